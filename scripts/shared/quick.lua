-- Shared by acquire and release: what their short ways begin with. They take the calls that most calls are: one set,
-- without a key, weight 1, nobody waits. Everything else, and every doubt, is left to the rest of the script, which says the same at length.
-- Leaves behind: meta (slots, lease and waiters of the only set), used, live, info.

local meta, used, live, info
local nobody_waits = false
if set_count == 1 and string.sub(ARGV[7], 1, 1) == '0' then
  meta = redis.call('HMGET', KEYS[3] .. ':meta', 'slots', 'lease', 'waiting')
  used, live, info = redis.call('ZCARD', KEYS[3]), tonumber(facts[4] or '0'), KEYS[3] .. ':info'
  -- A set that is gone while its live_until lies ahead was lost.
  nobody_waits = meta[1] and (meta[3] or '0') == '0' and not (used == 0 and live > now) and recovery == recovery_before
end

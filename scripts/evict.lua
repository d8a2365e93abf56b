#!lua flags=allow-oom
-- evict: has the request of one holder end. Unfenced, as operators are.
--
-- Guarantees: slots are taken from nobody who may still run. Whoever holds them is told, and gives them back once the
-- upstream is rid of the request; they are removed here only if their instance is gone, and the operator insists.
--
-- KEYS: 1 fleet  2 instances  3 slots  4 info
-- ARGV: holder, asking instance, presence ms, force (0 | 1), name of the channels, name of the set
-- Returns: mine | told | deaf | gone | removed | plain | unknown

local id = ARGV[1]
if not redis.call('ZSCORE', KEYS[3], id) then return 'unknown' end
local owner, weight = string.match(redis.call('HGET', KEYS[4], id) or '', '^(%S+) %S+ (%d+) ')
if not owner then return 'plain' end
if owner == ARGV[2] then return 'mine' end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seen = redis.call('ZSCORE', KEYS[2], owner)
if seen and tonumber(seen) >= now - tonumber(ARGV[3]) then
  local heard = redis.pcall('PUBLISH', ARGV[5] .. owner, '!' .. id)
  return type(heard) == 'number' and heard > 0 and 'told' or 'deaf'
end
if ARGV[4] ~= '1' then return 'gone' end

local members = {id}
for k = 2, tonumber(weight) do members[k] = id .. '~' .. k end
redis.call('ZREM', KEYS[3], unpack(members))
redis.call('HDEL', KEYS[4], id)
-- Who waits is granted the slots by the next heartbeat. A set that is empty now wasn't lost.
if redis.call('ZCARD', KEYS[3]) == 0 or redis.call('HLEN', KEYS[4]) == 0 then
  redis.call('HDEL', KEYS[1], 'live:' .. ARGV[6])
end
return 'removed'

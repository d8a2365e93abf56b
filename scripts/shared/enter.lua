-- Shared by all writing scripts: who calls, the fence, the fleet's own signs of a loss.
--
-- KEYS: 1 fleet  2 instances  then the slots of each set, whose other keys are named after them; then the rates
-- ARGV: 1 instance  2 epoch  3 gap ms  4 run id, presence ms and channel prefix  5 number of sets
--       then for each set: name, and its policy: keyed, shadow, fenced and warm (0 | 1), recovery ms, slots, lease ms,
--       grant ttl ms, queue size and ageing ms, and behind a semicolon each: name, share and queue size of each class
-- What belongs together is one text, since each argument costs the server as much as a look into a table.
--
-- Leaves behind: now, fleet, instances, me, last, recovery, facts (from the fourth on: live_until of each set),
-- fleet_writes, set_count, arg (the first ARGV behind the sets), and meta, used and told, which a short way fills in for a longer.

local CLOCK_SLACK = 1000
-- The fleet's last sign of life, and a set's live_until, needn't be exact: they are rewritten when they are off by this.
local LAST_STEP, LIVE_STEP = 100, 1000
local GRANTS_PER_CALL = 256

-- Waiters whose instance a short way told of a grant already, which a longer must then make.
local told = {}
-- Text beside number: Redis and Lua print large numbers slowly.
local meta, used
local time = redis.call('TIME')
local now_text = time[1] .. string.sub('00000' .. time[2], -6, -4)
local now = tonumber(now_text)
local fleet, instances = KEYS[1], KEYS[2]
local me, epoch, gap, set_count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5])

local facts, arg = {'last', 'recovery', 'epoch:' .. me}, 6 + 2 * set_count
for i = 1, set_count do facts[3 + i] = 'live:' .. ARGV[4 + 2 * i] end
facts = redis.call('HMGET', fleet, unpack(facts))
local newest = tonumber(facts[3] or '0')
if epoch < newest then return {-1} end

local last, recovery = tonumber(facts[1] or nil), tonumber(facts[2] or '0')
local recovery_before = tonumber(facts[2] or '-1')
local fleet_writes = {}
if not last or now < last or now - last >= LAST_STEP then
  fleet_writes[1], fleet_writes[2] = 'last', now_text
end
if epoch > newest then
  fleet_writes[#fleet_writes + 1], fleet_writes[#fleet_writes + 2] = 'epoch:' .. me, epoch
end
if not last then
  fleet_writes[#fleet_writes + 1], fleet_writes[#fleet_writes + 2] = 'run', string.match(ARGV[4], '^%S*')
  redis.call('ZADD', instances, now, me)
  recovery = now
elseif now < last - CLOCK_SLACK or now - last > gap then
  recovery = now
end
if last and now < last - CLOCK_SLACK then
  -- Or sets that are long empty would seem lost until the clock has caught up.
  local fields = redis.call('HGETALL', fleet)
  for i = 1, #fields, 2 do
    if string.find(fields[i], '^live:') then
      local live = tonumber(fields[i + 1]) - (last - now)
      redis.call('HSET', fleet, fields[i], live)
      for set = 1, set_count do
        if fields[i] == 'live:' .. ARGV[4 + 2 * set] then facts[3 + set] = tostring(live) end
      end
    end
  end
end
if recovery == now then
  -- Where the clock went back: the dead would else live until it has caught up.
  for _, instance in ipairs(redis.call('ZRANGE', instances, '(' .. now_text, '+inf', 'BYSCORE')) do
    redis.call('ZADD', instances, now, instance)
  end
end

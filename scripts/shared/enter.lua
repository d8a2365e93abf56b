-- Shared by all writing scripts: who calls, the fence, the fleet's own signs of a loss.
-- Leaves behind: now, fleet, instances, me, presence, channel, recovery, sets, arg (the first ARGV behind the sets).

local CLOCK_SLACK = 1000
local GRANTS_PER_CALL = 256

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fleet, instances = KEYS[1], KEYS[2]
local me, epoch, run = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local gap, presence, channel = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]

local sets, arg = {}, 8
local facts = {'last', 'run', 'recovery', 'epoch:' .. me}
do
  local key = 3
  for i = 1, tonumber(ARGV[7]) do
    local set = {
      name = ARGV[arg], claim = ARGV[arg + 1] .. ' ' .. ARGV[arg + 2],
      grant_ttl = ARGV[arg + 3], recovery = ARGV[arg + 4], queue = ARGV[arg + 5], ageing = ARGV[arg + 6],
      slots = KEYS[key], meta = KEYS[key + 1], info = KEYS[key + 2],
      -- Of class c: its queue is KEYS[queues + c], its name ARGV[names + 2 * c], its share ARGV[shares + 2 * c].
      classes = tonumber(ARGV[arg + 7]), queues = key + 2, names = arg + 6, shares = arg + 7, till = 0,
    }
    key, arg = key + 3 + set.classes, arg + 8 + 2 * set.classes
    facts[4 + i] = 'live:' .. set.name
    sets[i] = set
  end
end

facts = redis.call('HMGET', fleet, unpack(facts))
local newest = tonumber(facts[4] or '0')
if epoch < newest then return {-1} end

local last, recovery = tonumber(facts[1]), tonumber(facts[3] or '0')
local nobody = redis.call('EXISTS', instances) == 0
local fleet_writes = {'last', now}
if not last or nobody or facts[2] ~= run or now < last - CLOCK_SLACK or now - last > gap then
  recovery = now
end
if facts[2] ~= run then
  fleet_writes[3], fleet_writes[4] = 'run', run
end
if epoch > newest then
  fleet_writes[#fleet_writes + 1] = 'epoch:' .. me
  fleet_writes[#fleet_writes + 1] = epoch
end
if nobody then redis.call('ZADD', instances, now, me) end
local recovery_before = tonumber(facts[3] or '-1')

local seen = {}
local function seen_within(instance, time)
  local at = seen[instance]
  if at == nil then
    at = tonumber(redis.call('ZSCORE', instances, instance) or nil) or false
    seen[instance] = at
  end
  return at and at >= now - time
end

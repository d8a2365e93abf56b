#!lua flags=no-writes,allow-stale
-- status: one set as it is now. Read only, unfenced.
--
-- KEYS: 1 fleet  2 slots  3 meta  4 info  then one wait queue for each class
-- ARGV: (none)
-- Returns: {slots in force, lease in force ms, slots used by holders whose lease isn't over, start of recovery, now,
--           number of classes, for each of them: waiters, ms the oldest has waited,
--           number of instances, for each of them: instance, slots}

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local meta = redis.call('HMGET', KEYS[3], 'slots', 'lease')
local slots, lease = tonumber(meta[1] or '0'), tonumber(meta[2] or '0')
local recovery = tonumber(redis.call('HGET', KEYS[1], 'recovery') or '0')
local holders = redis.call('ZRANGEBYSCORE', KEYS[2], now - lease, '+inf')

local function info_of(id)
  local text = redis.call('HGET', KEYS[4], id)
  if not text then return nil end
  local instance, at = string.match(text, '^(%S+) %S+ %d+ (%-?%d+)')
  return instance, tonumber(at)
end

local answer = {slots, lease, #holders, recovery, now, #KEYS - 4}
for k = 5, #KEYS do
  local first = redis.call('ZRANGE', KEYS[k], 0, 0)[1]
  local _, at = info_of(first or '')
  answer[#answer + 1] = redis.call('ZCARD', KEYS[k])
  answer[#answer + 1] = at and math.max(0, now - at) or 0
end

local by_instance, names = {}, {}
for _, member in ipairs(holders) do
  local instance = info_of(string.match(member, '^[^~]+'))
  if instance then
    if not by_instance[instance] then names[#names + 1] = instance end
    by_instance[instance] = (by_instance[instance] or 0) + 1
  end
end
table.sort(names)
answer[#answer + 1] = #names
for _, instance in ipairs(names) do
  answer[#answer + 1] = instance
  answer[#answer + 1] = by_instance[instance]
end
return answer

-- Shared by release alone: its short way. No id was ever in a queue.

local function release_quick()
  for at = arg, #ARGV, 7 do
    if ARGV[at + 2] ~= '0' or ARGV[at + 3] ~= '0' or ARGV[at + 4] ~= '1' or ARGV[at + 6] ~= '1' then return nil end
  end
  local answer, gone = {now, recovery, 0}, {}
  for at = arg, #ARGV, 7 do
    local released = redis.call('ZREM', KEYS[3], ARGV[at])
    if released == 1 then gone[#gone + 1] = ARGV[at] end
    answer[#answer + 1] = released == 1 and 0 or 2
  end
  if #gone > 0 then
    redis.call('HDEL', KEYS[5], unpack(gone))
    if used == #gone or redis.call('HLEN', KEYS[5]) == 0 then redis.call('HDEL', fleet, 'live:' .. ARGV[8]) end
  end
  if #fleet_writes > 0 then redis.call('HSET', fleet, unpack(fleet_writes)) end
  return answer
end

if nobody_waits then
  local answer = release_quick()
  if answer then return answer end
end

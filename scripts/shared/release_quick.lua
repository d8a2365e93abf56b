-- Shared by release alone: its short way. No id was ever in a queue.

local function release_quick()
  local at = arg
  while at <= #ARGV do
    if not string.find(ARGV[at], '^%d+ 0;1 1$') then return nil end
    at = at + 2 + ARGV[at + 1]
  end
  local answer, gone = {now, recovery, 0}, {}
  at = arg
  while at <= #ARGV do
    local last_id = at + 1 + ARGV[at + 1]
    for i = at + 2, last_id do
      local released = redis.call('ZREM', KEYS[3], ARGV[i])
      if released == 1 then gone[#gone + 1] = ARGV[i] end
      answer[#answer + 1] = released == 1 and 0 or 2
    end
    at = last_id + 1
  end
  if #gone > 0 then
    redis.call('HDEL', info, unpack(gone))
    if used == #gone or redis.call('HLEN', info) == 0 then redis.call('HDEL', fleet, 'live:' .. ARGV[6]) end
  end
  if #fleet_writes > 0 then redis.call('HSET', fleet, unpack(fleet_writes)) end
  return answer
end

if nobody_waits then
  local answer = release_quick()
  if answer then return answer end
end

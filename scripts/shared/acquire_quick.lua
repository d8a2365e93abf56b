-- Shared by acquire alone: its short way. Every id is new and there is room for all.

local function acquire_quick()
  if recovery > 0 and now < recovery + ARGV[12] then return nil end
  local slots, members, infos, count = tonumber(meta[1]), {}, {}, 0
  local answer = {now, recovery, 0, 0}
  for at = arg, #ARGV, 10 do
    local class = ARGV[at + 2]
    if ARGV[at + 5] ~= '0' or ARGV[at + 6] ~= '0' or ARGV[at + 7] ~= '1' or ARGV[at + 9] ~= '1' then return nil end
    if used + count >= math.min(slots, math.max(1, math.floor(ARGV[16 + 3 * class] * slots))) then return nil end
    local id = ARGV[at]
    members[2 * count + 1], members[2 * count + 2] = now_text, id
    infos[2 * count + 1], infos[2 * count + 2] = id, me .. ' ' .. ARGV[15 + 3 * class] .. ' 1 ' .. now_text .. ' ' .. ARGV[at + 1]
    answer[3 * count + 5], answer[3 * count + 6], answer[3 * count + 7] = 0, 0, 0
    count = count + 1
  end
  redis.call('ZADD', KEYS[3], unpack(members))
  redis.call('HSET', KEYS[5], unpack(infos))
  if live < now + meta[2] then
    fleet_writes[#fleet_writes + 1] = 'live:' .. ARGV[8]
    fleet_writes[#fleet_writes + 1] = now + meta[2] + LIVE_STEP
  end
  if #fleet_writes > 0 then redis.call('HSET', fleet, unpack(fleet_writes)) end
  return answer
end

if nobody_waits then
  local answer = acquire_quick()
  if answer then return answer end
end

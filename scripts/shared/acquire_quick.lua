-- Shared by acquire alone: its short way. Every id is new and there is room for all.

local function acquire_quick()
  local policy, slots = ARGV[7], tonumber(meta[1])
  if recovery > 0 and now < recovery + string.match(policy, '^%d %d (%d+)') then return nil end
  local members, infos, at, place = {}, {}, arg, 1
  while at <= #ARGV do
    local class, route = string.match(ARGV[at], '^(%d+) %d 0 %d+;1 1;(.*)$')
    if not class then return nil end
    local name, share = string.match(policy, '^' .. string.rep('[^;]*;', class) .. '(%S+) (%S+)')
    local last_id = at + 1 + ARGV[at + 1]
    if used + (place - 1) / 2 + ARGV[at + 1] > math.min(slots, math.max(1, math.floor(share * slots))) then return nil end
    local about = me .. ' ' .. name .. ' 1 ' .. now_text .. ' ' .. route
    for i = at + 2, last_id do
      members[place], members[place + 1] = now_text, ARGV[i]
      infos[place], infos[place + 1] = ARGV[i], about
      place = place + 2
    end
    at = last_id + 1
  end
  redis.call('ZADD', KEYS[3], unpack(members))
  redis.call('HSET', info, unpack(infos))
  if live < now + meta[2] then
    fleet_writes[#fleet_writes + 1] = 'live:' .. ARGV[6]
    fleet_writes[#fleet_writes + 1] = now + meta[2] + LIVE_STEP
  end
  if #fleet_writes > 0 then redis.call('HSET', fleet, unpack(fleet_writes)) end
  local answer = {now, recovery, 0, 0}
  for i = 1, 3 * (place - 1) / 2 do answer[4 + i] = 0 end
  return answer
end

if nobody_waits then
  local answer = acquire_quick()
  if answer then return answer end
end

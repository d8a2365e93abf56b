-- Shared by release and acquire: their short way. It takes the calls that most calls are: one set without a key or a fence,
-- weight 1, nobody waits, no id was ever in a queue, and there is room for every newcomer. Everything else, and every doubt, is left to the
-- rest of the script, which says the same at length.

local function quick()
  local slots, info, policy = KEYS[3], KEYS[3] .. ':info', ARGV[7]
  meta = redis.call('HMGET', slots .. ':meta', 'slots', 'lease', 'waiting', 'queues', 'ticket')
  used = redis.call('ZCARD', slots)
  local live = tonumber(facts[4] or '0')
  -- A set that is gone while its live_until lies ahead was lost.
  local lost = used == 0 and live > now
  if not meta[1] or lost or (meta[3] or '0') ~= '0' or recovery ~= recovery_before then return nil end

  -- Everything is looked at before anything is done.
  local newcomers = arg + 1
  for _ = 1, tonumber(ARGV[arg]) do
    if not string.find(ARGV[newcomers], '^%d+ 0;1 1$') then return nil end
    newcomers = newcomers + 2 + ARGV[newcomers + 1]
  end
  local members, infos, place, at = {}, {}, 1, newcomers
  if at <= #ARGV and recovery > 0 and now < recovery + string.match(policy, '^%d %d %d %d (%d+)') then return nil end
  while at <= #ARGV do
    local class, route = string.match(ARGV[at], '^(%d+) %d 0 %d+;1 1;(.*)$')
    if not class then return nil end
    local name, share = string.match(policy, '^' .. string.rep('[^;]*;', class) .. '(%S+) (%S+)')
    local last_id, n = at + 1 + ARGV[at + 1], tonumber(meta[1])
    if used + (place - 1) / 2 + ARGV[at + 1] > math.min(n, math.max(1, math.floor(share * n))) then return nil end
    local about = me .. ' ' .. name .. ' 1 ' .. now_text .. ' ' .. route
    for i = at + 2, last_id do
      members[place], members[place + 1] = now_text, ARGV[i]
      infos[place], infos[place + 1] = ARGV[i], about
      place = place + 2
    end
    at = last_id + 1
  end

  local answer, gone = {now, recovery, 0, 0, 0}, {}
  at = arg + 1
  while at < newcomers do
    local last_id = at + 1 + ARGV[at + 1]
    for i = at + 2, last_id do
      local released = redis.call('ZREM', slots, ARGV[i])
      if released == 1 then gone[#gone + 1] = ARGV[i] end
      answer[#answer + 1] = released == 1 and 0 or 2
    end
    at = last_id + 1
  end
  answer[5] = #answer - 5
  if #gone > 0 then redis.call('HDEL', info, unpack(gone)) end
  if place > 1 then
    redis.call('ZADD', slots, unpack(members))
    redis.call('HSET', info, unpack(infos))
    if live < now + meta[2] then
      fleet_writes[#fleet_writes + 1] = 'live:' .. ARGV[6]
      fleet_writes[#fleet_writes + 1] = now + meta[2] + LIVE_STEP
    end
  elseif #gone > 0 and (used == #gone or redis.call('HLEN', info) == 0) then
    redis.call('HDEL', fleet, 'live:' .. ARGV[6])
  end
  if #fleet_writes > 0 then redis.call('HSET', fleet, unpack(fleet_writes)) end
  for _ = 1, 3 + 3 * (place - 1) / 2 do answer[#answer + 1] = 0 end
  return answer
end

if set_count == 1 and string.find(ARGV[7], '^0 %d 0') then
  local answer = quick()
  if answer then return answer end
end

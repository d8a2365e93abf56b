-- Shared by release and acquire: their short way where requests wait, for a slot that is handed on and for the word that a
-- grant has arrived. It takes calls of one plain set and weight 1, where one class waits, which may have every slot; where
-- nothing has to be purged, refused or displaced, and everyone next in line is alive and hears. Everything else, and every
-- doubt, is left to the rest of the script.

local function pass_on()
  local policy, slots, info, meta_key = ARGV[7], KEYS[3], KEYS[3] .. ':info', KEYS[3] .. ':meta'
  local n, lease, waiting, noted, ticket = tonumber(meta[1] or nil), meta[2], tonumber(meta[3] or '0'), meta[4], tonumber(meta[5] or nil)
  local pause, grant_ttl, most = string.match(policy, '^0 0 0 %d (%d+) %d+ %d+ (%d+) (%d+)')
  if not pause or not n or not noted or not ticket or used == 0 then return nil end
  if recovery ~= recovery_before or (recovery > 0 and now < recovery + pause) then return nil end

  -- The class is that of who leaves first, or comes.
  local first = arg + 1
  local class = string.match(ARGV[first], '^%d+')
  local name, share, room = string.match(policy, '^' .. string.rep('[^;]*;', class) .. '(%S+) (%S+) (%d+)')
  if share ~= '1' then return nil end
  for mark in string.gmatch(noted, '[^;]+') do
    if not string.find(policy, ';' .. mark .. ' ', 1, true) then return nil end
  end
  local others = {}
  for other in string.gmatch(policy, ';(%S+)') do
    if other ~= name then others[#others + 1] = slots .. ':wait:' .. other end
  end
  if #others > 0 and redis.call('EXISTS', unpack(others)) > 0 then return nil end
  if redis.call('ZCOUNT', slots, '-inf', '(' .. (now - lease)) > 0 then return nil end

  -- Everything is looked at before anything is done: who leaves, who says that its grant arrived, who is new.
  local leaving, arrived, settled, newcomers, infos, named = {}, {}, {}, {}, {}, {}
  local at = first
  for _ = 1, tonumber(ARGV[arg]) do
    local queued = string.match(ARGV[at], '^%d+ (%d);1 1$')
    if not queued then return nil end
    for i = at + 2, at + 1 + ARGV[at + 1] do
      local id = ARGV[i]
      if named[id] then return nil end
      leaving[#leaving + 1], named[id] = id, true
      if queued == '1' then settled[#settled + 1] = 'pending:' .. id end
    end
    at = at + 2 + ARGV[at + 1]
  end
  local outcomes = {}
  while at <= #ARGV do
    local of_class, again, waited, route = string.match(ARGV[at], '^(%d+) 1 (%d) (%d+);1 1;(.*)$')
    if not again or (again == '0' and of_class ~= class) then return nil end
    for i = at + 2, at + 1 + ARGV[at + 1] do
      local id = ARGV[i]
      if named[id] then return nil end
      named[id] = true
      if again == '1' then
        arrived[#arrived + 1], settled[#settled + 1] = id, 'pending:' .. id
      else
        newcomers[#newcomers + 1] = id
        infos[#infos + 1] = id
        infos[#infos + 1] = me .. ' ' .. name .. ' 1 ' .. (now - waited) .. ' ' .. route
      end
      outcomes[#outcomes + 1] = again
    end
    at = at + 2 + ARGV[at + 1]
  end
  for _, ids in ipairs({leaving, arrived}) do
    if #ids > 0 then
      for _, score in ipairs(redis.call('ZMSCORE', slots, unpack(ids))) do
        if not score then return nil end
      end
    end
  end

  local queue = slots .. ':wait:' .. name
  local free = n - used + #leaving
  local count = #leaving > 0 and math.max(0, math.min(free, waiting)) or 0
  local stay = waiting - count
  if count > GRANTS_PER_CALL then return nil end
  -- Newcomers only ever go behind waiters, or this would be no hand-over.
  local line = 0
  if #newcomers > 0 then
    if stay == 0 or free > count or not string.find(';' .. noted, ';' .. name .. ' 1;', 1, true) then return nil end
    line = redis.call('ZCARD', queue) - count
    if stay + #newcomers > tonumber(most) or line + #newcomers > tonumber(room) then return nil end
  end

  local next_up, granted, members, changes, waiters, till = {}, {}, {}, {}, {}, 0
  if count > 0 then
    local run, presence, channel = string.match(ARGV[4], '^(%S*) (%d+) (.*)$')
    next_up = redis.call('ZRANGE', queue, 0, count - 1)
    if #next_up < count then return nil end
    local texts, owners, hears = redis.call('HMGET', info, unpack(next_up)), {}, {}
    for i = 1, count do
      local owner, of_class, route = string.match(texts[i] or '', '^(%S+) (%S+) 1 %-?%d+ (.*)$')
      if of_class ~= name then return nil end
      if not waiters[owner] then
        local seen = tonumber(redis.call('ZSCORE', instances, owner) or nil)
        if not seen or seen < now - presence then return nil end
        waiters[owner] = 0
        hears[owner] = owner ~= me and redis.call('HGET', fleet, 'sub:' .. owner) == '1'
      end
      owners[i], waiters[owner] = owner, waiters[owner] + 1
      infos[#infos + 1], infos[#infos + 2] = next_up[i], owner .. ' ' .. name .. ' 1 ' .. now_text .. ' ' .. route
    end
    for i = 1, count do
      local id, owner = next_up[i], owners[i]
      if owner == me then
        granted[#granted + 1] = id
        members[2 * i - 1] = now_text
        till = now + lease
      else
        if hears[owner] then
          local heard = redis.pcall('PUBLISH', channel .. owner, id)
          if type(heard) ~= 'number' or heard == 0 then return nil end
          told[id] = true
        end
        changes[#changes + 1], changes[#changes + 2] = 'pending:' .. id, owner
        members[2 * i - 1] = now - lease + grant_ttl
        till = math.max(till, now + grant_ttl)
      end
      members[2 * i] = id
    end
  end

  if #settled > 0 then redis.call('HDEL', meta_key, unpack(settled)) end
  if #leaving > 0 then
    redis.call('ZREM', slots, unpack(leaving))
    redis.call('HDEL', info, unpack(leaving))
  end
  if count > 0 then redis.call('ZREM', queue, unpack(next_up)) end
  for _, id in ipairs(arrived) do
    members[#members + 1], members[#members + 2] = now_text, id
    till = now + lease
  end
  if #members > 0 then redis.call('ZADD', slots, unpack(members)) end
  if #infos > 0 then redis.call('HSET', info, unpack(infos)) end
  if #newcomers > 0 then
    local places = {}
    for i, id in ipairs(newcomers) do places[2 * i - 1], places[2 * i] = ticket + i, id end
    redis.call('ZADD', queue, unpack(places))
    waiters[me] = waiters[me] or 0
    changes[#changes + 1], changes[#changes + 2] = 'ticket', ticket + #newcomers
  end
  for owner, gone in pairs(waiters) do
    local field = 'waiters:' .. owner
    local left = math.max(0, (redis.call('HGET', meta_key, field) or 0) - gone)
    changes[#changes + 1], changes[#changes + 2] = field, owner == me and left + #newcomers or left
  end
  if #changes > 0 then
    redis.call('HSET', meta_key, 'waiting', stay + #newcomers, unpack(changes))
  end
  if #leaving > 0 and (used + count == #leaving or (#infos == 0 and redis.call('HLEN', info) == 0)) then
    redis.call('HDEL', fleet, 'live:' .. ARGV[6])
  elseif till > tonumber(facts[4] or '0') then
    fleet_writes[#fleet_writes + 1], fleet_writes[#fleet_writes + 2] = 'live:' .. ARGV[6], till + LIVE_STEP
  end
  if #fleet_writes > 0 then redis.call('HSET', fleet, unpack(fleet_writes)) end

  local answer = {now, recovery, #granted}
  for i = 1, #granted do answer[3 + i] = granted[i] end
  answer[#answer + 1], answer[#answer + 2] = 0, #leaving
  for _ = 1, #leaving + 3 do answer[#answer + 1] = 0 end
  for _, again in ipairs(outcomes) do
    local code, detail = 0, 0
    if again == '0' then
      line = line + 1
      code, detail = 1, line
    end
    answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = code, detail, 0
  end
  return answer
end

if set_count == 1 and used then
  local answer = pass_on()
  if answer then return answer end
end

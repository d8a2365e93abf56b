-- acquire: takes slots of every want of each request, or waits at the first set that is full, or keeps nothing.
-- Comes behind release.lua in one script.
--
-- Guarantees: an id is never counted twice; nobody passes a waiter; after "full", "recovering" or "too heavy"
-- nothing of the request is kept anywhere.
--
-- KEYS and ARGV of every writing script: see shared/enter.lua; then what release.lua takes
-- ARGV then for each group of requests that ask alike: what they ask, how many they are, and their ids. What they ask:
--       class (from 1), may wait (0 | 1), again (0 | 1), waited ms, then index in KEYS, requests, window ms and shadow
--       (0 | 1) of each rate; behind a semicolon set (from 1) and weight of each want; behind another the route
-- Returns: {-1} if the caller has a newer connection, else
--       {now, start of recovery, what the releases granted (add_grants), number of releases and a code for each
--        (0 released, 1 dequeued, 2 unknown), what the acquires granted (add_grants), number of displaced, displaced
--        ids …, then for each request: code, what of it, by what}
--       with code 0 granted, 1 waiting (length of the queue, want), refused: 2 full (length of the queue), 3 recovering,
--       4 too heavy, 5 rate limited (ms until it fits); ten more: granted, but a set or rate in shadow mode would have
--       refused. By what: a want, counted from 0, or a rate, counted from -1 down

local function enqueue(set, ask, weight)
  if set.warm and set.waiting == 0 then call_for_slots() end
  if not set.noted then see_others(set) end
  note_queue(set, set.classes[ask.class])
  local ticket = redis.call('HINCRBY', set.meta, 'ticket', 1)
  if ticket == 1 then
    -- The counter is new or was lost: stay above every standing ticket, so that order survives.
    local highest = 0
    for _, class in ipairs(set.classes) do
      local top = redis.call('ZREVRANGE', class.queue, 0, 0, 'WITHSCORES')
      highest = math.max(highest, tonumber(top[2] or '0'))
    end
    ticket = highest + 1
    redis.call('HSET', set.meta, 'ticket', ticket)
  end
  redis.call('ZADD', set.classes[ask.class].queue, ticket, ask.id)
  put_info(set, ask.id, me, ask.class, weight, now - ask.waited, ask.route)
  set.waiting = set.waiting + 1
  redis.call('HSET', set.meta, 'waiting', set.waiting)
  redis.call('HINCRBY', set.meta, 'waiters:' .. me, 1)
end

local function class_has_room(set, ask)
  local class = set.classes[ask.class]
  return ask.may_wait and redis.call('ZCARD', class.queue) < class.room
end

local function has_room(set, ask)
  return set.waiting < set.queue and class_has_room(set, ask)
end

local function no_room(set, ask)
  local never_waits = not ask.may_wait or set.queue == 0 or set.classes[ask.class].room == 0
  if never_waits and recovering(set) then return 3, 0 end
  return 2, line(set, ask.class)
end

-- The queue is full: the youngest waiter of the lowest class goes, if that class is lower than the newcomer's.
local function displace_for(set, ask)
  if set.queue == 0 or not class_has_room(set, ask) then return false end
  for class = #set.classes, ask.class + 1, -1 do
    local id = redis.call('ZPOPMAX', set.classes[class].queue)[1]
    if id then
      local info = info_of(set, id)
      redis.call('HDEL', set.info, id)
      uncount_waiter(set, info and info.instance)
      if info then notify(info.instance, id, '-') end
      return true
    end
  end
  return false
end

-- Its own outcome tells of a grant to a request of this call.
local function tell_by_outcome(id)
  for i, other in ipairs(granted) do
    if other == id then return table.remove(granted, i) end
  end
end

-- A slot is free although others wait: the newcomer stands in line with them for it, and never jumps the queue.
local function take_by_turn(set, ask, weight, room)
  enqueue(set, ask, weight)
  grant(set)
  if redis.call('ZSCORE', set.slots, ask.id) then
    tell_by_outcome(ask.id)
    return 0, 0
  end
  if room or displace_for(set, ask) then return 1, line(set, ask.class) end
  dequeue(set, ask.id, ask.class)
  return no_room(set, ask)
end

local function admit(set, ask, weight)
  put_slot(set, ask.id, now, weight)
  put_info(set, ask.id, me, ask.class, weight, now, ask.route)
  fence(set, ask.id)
end

-- What a set in shadow mode would say, if it would say no. Everyone is admitted.
local function take_in_shadow(set, ask, weight)
  local limit, code, detail = cap(set, ask.class), 0, 0
  if set.n > 0 and weight > limit then
    code = 4
  else
    if set.used + weight > limit then purge(set) end
    if (recovering(set) or set.used + weight > limit) and not has_room(set, ask) then code, detail = no_room(set, ask) end
  end
  admit(set, ask, weight)
  return code > 0 and code + 10 or 0, detail
end

-- Returns a code and what of it.
local function take(set, ask, weight)
  if ask.again then
    if redis.call('ZSCORE', set.slots, ask.id) then
      redis.call('HDEL', set.meta, 'pending:' .. ask.id)
      put_slot(set, ask.id, now, weight)
      tell_by_outcome(ask.id)
      fence(set, ask.id)
      return 0, 0
    end
    if redis.call('ZSCORE', set.classes[ask.class].queue, ask.id) then return 1, line(set, ask.class) end
  end
  if set.shadow then return take_in_shadow(set, ask, weight) end
  local limit = cap(set, ask.class)
  if set.n > 0 and weight > limit then return 4, 0 end
  local recovers = recovering(set)
  if set.waiting > 0 or set.used + weight > limit then purge(set) end
  if not recovers and set.waiting == 0 and set.used + weight <= limit then
    admit(set, ask, weight)
    return 0, 0
  end
  local room = has_room(set, ask)
  if not recovers and set.waiting > 0 and set.used < set.n then
    return take_by_turn(set, ask, weight, room)
  end
  if room or displace_for(set, ask) then
    enqueue(set, ask, weight)
    return 1, line(set, ask.class)
  end
  return no_room(set, ask)
end

-- A sliding window log. Counts a request, or says when it would fit. One exactly a window old still counts.
local function pass_rate(ask, key, requests, window)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. (now - window))
  if ask.again and redis.call('ZSCORE', key, ask.id) then return 0, 0 end
  local over = redis.call('ZCARD', key) - requests
  if over >= 0 then
    local entry = redis.call('ZRANGE', key, over, over, 'WITHSCORES')
    return 5, math.max(0, entry[2] + window + 1 - now)
  end
  redis.call('ZADD', key, now_text, ask.id)
  redis.call('PEXPIRE', key, window + 1000)
  return 0, 0
end

-- Takes the entry out of the rates up to the place of this one.
local function refund(ask, last_place)
  for place = 1, last_place, 4 do redis.call('ZREM', KEYS[ask.rates[place]], ask.id) end
end

-- Takes one request through its rates and wants. Returns a code, what of it, and by what.
local function acquire_one(ask)
  local rates, wants = ask.rates, ask.wants
  local shadow, shadow_detail, shadow_by
  for r = 1, #rates, 4 do
    local code, detail = pass_rate(ask, KEYS[rates[r]], rates[r + 1], rates[r + 2])
    local by = -(r + 3) / 4
    if code > 0 and rates[r + 3] == 1 then
      if not shadow then shadow, shadow_detail, shadow_by = code + 10, detail, by end
    elseif code > 0 then
      refund(ask, r - 1)
      return code, detail, by
    end
  end
  for w = 1, #wants, 2 do
    local code, detail = take(sets[wants[w]], ask, wants[w + 1])
    local by = (w - 1) / 2
    if code == 1 then return 1, detail, by end
    if code > 10 then
      if not shadow then shadow, shadow_detail, shadow_by = code, detail, by end
    elseif code > 0 then
      -- Refused, so it gives back what its first wants took.
      for earlier = 1, w - 1, 2 do
        local held = sets[wants[earlier]]
        give_back(held, ask.id, ask.class, wants[earlier + 1], true)
        grant(held)
      end
      refund(ask, #rates)
      return code, detail, by
    end
  end
  return shadow or 0, shadow_detail or 0, shadow_by or 0
end

local outcomes = {}
while arg <= #ARGV do
  local head, wants, route = string.match(ARGV[arg], '^([^;]*);([^;]*);(.*)$')
  local class, may_wait, again, waited, rates = string.match(head, '^(%d+) (%d) (%d) (%d+)(.*)$')
  rates, wants = numbers(rates), numbers(wants)
  local last_id = arg + 1 + ARGV[arg + 1]
  for i = arg + 2, last_id do
    local code, detail, by = acquire_one({
      id = ARGV[i], class = tonumber(class), may_wait = may_wait == '1', again = again == '1', waited = waited,
      rates = rates, wants = wants, route = route,
    })
    outcomes[#outcomes + 1], outcomes[#outcomes + 2], outcomes[#outcomes + 3] = code, detail, by
  end
  arg = last_id + 1
end

local rest = {}
add_grants(rest, handed_on, fences_handed_on)
add_list(rest, released)
add_grants(rest, granted, fences)
add_list(rest, displaced)
for _, value in ipairs(outcomes) do rest[#rest + 1] = value end
return conclude(rest)

-- acquire: takes slots of every want of each request, or waits at the first set that is full, or keeps nothing.
--
-- Guarantees: an id is never counted twice; nobody passes a waiter; after "full", "recovering" or "too heavy"
-- nothing of the request is kept anywhere.
--
-- KEYS: 1 fleet  2 instances  then for each set: slots, meta, info, one wait queue for each class
-- ARGV: 1 instance  2 epoch  3 run id  4 gap ms  5 presence ms  6 channel prefix  7 number of sets
--       then for each set: name, slots, lease ms, grant ttl ms, recovery ms, queue size, ageing ms, number of
--       classes, and name and share of each class
--       then for each request: id, route, class (from 1), waited ms, may wait (0 | 1), again (0 | 1),
--       number of wants, and set (from 1) and weight of each want
-- Returns: {-1} if the caller has a newer connection, else
--       {now, start of recovery, number of granted, granted ids …, then for each request: code, want, queue length}
--       with code 0 granted, 1 waiting, 2 full, 3 recovering, 4 too heavy, and want counted from 0

for _, set in ipairs(sets) do open(set, meta, used) end

local function enqueue(set, ask, weight)
  local ticket = redis.call('HINCRBY', set.meta, 'ticket', 1)
  if ticket == 1 then
    -- The counter is new or was lost: stay above every standing ticket, so that order survives.
    local highest = 0
    for class = 1, set.classes do
      local top = redis.call('ZREVRANGE', KEYS[set.queues + class], 0, 0, 'WITHSCORES')
      highest = math.max(highest, tonumber(top[2] or '0'))
    end
    ticket = highest + 1
    redis.call('HSET', set.meta, 'ticket', ticket)
  end
  redis.call('ZADD', KEYS[set.queues + ask.class], ticket, ask.id)
  put_info(set, ask.id, me, ask.class, weight, now - ask.waited, ask.route)
  set.waiting = set.waiting + 1
  redis.call('HSET', set.meta, 'waiting', set.waiting)
  redis.call('HINCRBY', set.meta, 'waiters:' .. me, 1)
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
    return 0
  end
  if room then return 1 end
  dequeue(set, ask.id, ask.class)
  return 2
end

local function take(set, ask, weight)
  if ask.again then
    if redis.call('ZSCORE', set.slots, ask.id) then
      redis.call('HDEL', set.meta, 'pending:' .. ask.id)
      put_slot(set, ask.id, now, weight)
      tell_by_outcome(ask.id)
      return 0
    end
    if redis.call('ZSCORE', KEYS[set.queues + ask.class], ask.id) then return 1 end
  end
  local limit = cap(set, ask.class)
  if set.n > 0 and weight > limit then return 4 end
  local recovers = recovering(set)
  if set.waiting > 0 or set.used + weight > limit then purge(set) end
  if not recovers and set.waiting == 0 and set.used + weight <= limit then
    put_slot(set, ask.id, now, weight)
    put_info(set, ask.id, me, ask.class, weight, now, ask.route)
    return 0
  end
  local room = ask.may_wait and set.waiting < tonumber(set.queue)
  if not recovers and set.waiting > 0 and set.used < set.n then
    return take_by_turn(set, ask, weight, room)
  end
  if room then
    enqueue(set, ask, weight)
    return 1
  end
  if recovers and not ask.may_wait then return 3 end
  return 2
end

local outcomes = {}
while arg <= #ARGV do
  local ask = {
    id = ARGV[arg], route = ARGV[arg + 1], class = tonumber(ARGV[arg + 2]), waited = ARGV[arg + 3],
    may_wait = ARGV[arg + 4] == '1', again = ARGV[arg + 5] == '1',
  }
  local wants = tonumber(ARGV[arg + 6])
  arg = arg + 7
  local code, at, queue = 0, 0, 0
  for w = 1, wants do
    local set, weight = sets[tonumber(ARGV[arg + 2 * w - 2])], tonumber(ARGV[arg + 2 * w - 1])
    code = take(set, ask, weight)
    if code > 0 then
      at, queue = w - 1, set.waiting
      -- Refused, so it gives back what its first wants took.
      for earlier = 1, code > 1 and w - 1 or 0 do
        local held = sets[tonumber(ARGV[arg + 2 * earlier - 2])]
        give_back(held, ask.id, ask.class, tonumber(ARGV[arg + 2 * earlier - 1]), true)
        grant(held)
      end
      break
    end
  end
  outcomes[#outcomes + 1], outcomes[#outcomes + 2], outcomes[#outcomes + 3] = code, at, queue
  arg = arg + 2 * wants
end

return conclude(granted, outcomes)

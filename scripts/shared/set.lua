-- Shared by all writing scripts: one semaphore's policy, loss, purge; take and give back; the end of an operation.

local function cap(set, class)
  return math.min(set.n, math.max(1, math.floor(tonumber(ARGV[set.shares + 2 * class]) * set.n)))
end

local function recovering(set)
  return recovery > 0 and now < recovery + tonumber(set.recovery)
end

-- Instance → its claim.
local function claims_of(set)
  local claims, fields = {}, redis.call('HGETALL', set.meta)
  for i = 1, #fields, 2 do
    local instance = string.match(fields[i], '^claim:(.+)$')
    if instance then claims[instance] = fields[i + 1] end
  end
  return claims
end

-- N in force = the lowest claim of living instances. Lease in force = the longest of those seen within it.
local function settle_policy(set, claims)
  local slots, lease
  for instance, claim in pairs(claims) do
    local s, l = string.match(claim, '^(%d+) (%d+)$')
    s, l = tonumber(s), tonumber(l)
    if (instance == me or seen_within(instance, presence)) and (not slots or s < slots) then slots = s end
    if (instance == me or seen_within(instance, l)) and (not lease or l > lease) then lease = l end
  end
  if not slots or not lease then return end
  if set.n and set.lease ~= lease then recovery = now end
  if set.n ~= slots or set.lease ~= lease then
    set.n, set.lease = slots, lease
    redis.call('HSET', set.meta, 'slots', slots, 'lease', lease)
  end
end

local function purge(set)
  local purged = redis.call('ZREMRANGEBYSCORE', set.slots, '-inf', '(' .. (now - set.lease))
  if set.swept ~= recovery then
    set.swept = recovery
    redis.call('HSET', set.meta, 'swept', recovery)
    purged = purged + redis.call('ZREMRANGEBYSCORE', set.slots, '(' .. (now + CLOCK_SLACK), '+inf')
  end
  if purged > 0 then
    set.used, set.removed = set.used - purged, true
    redis.call('HSET', set.meta, 'dirty', 1)
  end
end

-- Every operation on a set starts here.
local function open(set, live)
  local meta = redis.call('HMGET', set.meta, 'slots', 'lease', 'waiting', 'swept', 'claim:' .. me)
  set.n, set.lease = tonumber(meta[1] or nil), tonumber(meta[2] or nil)
  set.waiting, set.swept = tonumber(meta[3] or '0'), tonumber(meta[4] or '0')
  set.live = tonumber(live or '0')
  redis.call('PERSIST', set.slots)
  set.used = redis.call('ZCARD', set.slots)
  local lost = set.live > now and (set.used == 0 or not set.n)
  if not set.n or meta[5] ~= set.claim then
    redis.call('HSET', set.meta, 'claim:' .. me, set.claim)
    settle_policy(set, claims_of(set))
  end
  if lost then
    recovery, set.live, set.forget_live = now, 0, true
  end
  if not recovering(set) then purge(set) end
end

-- The members of a holder of weight w: id, id~2 … id~w.
local function put_slot(set, id, score, weight)
  set.till = math.max(set.till, score + set.lease)
  if weight == 1 then
    set.used = set.used + redis.call('ZADD', set.slots, score, id)
    return
  end
  local members = {score, id}
  for k = 2, weight do
    members[#members + 1], members[#members + 2] = score, id .. '~' .. k
  end
  set.used = set.used + redis.call('ZADD', set.slots, unpack(members))
end

local function remove_slot(set, id, weight)
  local members = {id}
  for k = 2, weight do members[k] = id .. '~' .. k end
  local gone = redis.call('ZREM', set.slots, unpack(members))
  if gone == 0 then return false end
  set.used, set.removed = set.used - gone, true
  return true
end

local function put_info(set, id, instance, class, weight, at, route)
  local name = ARGV[set.names + 2 * class]
  redis.call('HSET', set.info, id, instance .. ' ' .. name .. ' ' .. weight .. ' ' .. at .. ' ' .. route)
end

local function info_of(set, id)
  local text = redis.call('HGET', set.info, id)
  if not text then return nil end
  local instance, class, weight, at, route = string.match(text, '^(%S+) (%S+) (%d+) (%-?%d+) (.*)$')
  return instance and {instance = instance, class = class, weight = tonumber(weight), at = tonumber(at), route = route}
end

local function uncount_waiter(set, instance)
  set.waiting = math.max(0, set.waiting - 1)
  redis.call('HSET', set.meta, 'waiting', set.waiting)
  if instance then
    local count = tonumber(redis.call('HGET', set.meta, 'waiters:' .. instance) or '0')
    if count > 0 then redis.call('HINCRBY', set.meta, 'waiters:' .. instance, -1) end
  end
end

local function dequeue(set, id, class)
  if redis.call('ZREM', KEYS[set.queues + class], id) == 0 then return false end
  local info = info_of(set, id)
  redis.call('HDEL', set.info, id)
  uncount_waiter(set, info and info.instance)
  return true
end

-- Returns 0 released, 1 dequeued, 2 unknown.
local function give_back(set, id, class, weight, queued)
  if queued then redis.call('HDEL', set.meta, 'pending:' .. id) end
  if remove_slot(set, id, weight) then
    redis.call('HDEL', set.info, id)
    return 0
  end
  if queued and dequeue(set, id, class) then return 1 end
  return 2
end

-- Ends an operation: rewrites every set's live_until, the latest end of a lease among members that have an info, that
-- is: our own; then what is known of the fleet.
-- Returns {now, start of recovery, number of granted, granted ids …, rest …}
local function conclude(granted, rest)
  for _, set in ipairs(sets) do
    local till
    if set.removed then
      local rank = 0
      repeat
        local top = redis.call('ZREVRANGE', set.slots, rank, rank, 'WITHSCORES')
        if top[1] and redis.call('HEXISTS', set.info, string.match(top[1], '^[^~]+')) == 1 then
          till = top[2] + set.lease
        end
        rank = rank + 1
      until till or not top[1]
    elseif set.till > 0 then
      till = math.max(set.live, set.till)
    end
    if till then
      fleet_writes[#fleet_writes + 1] = 'live:' .. set.name
      fleet_writes[#fleet_writes + 1] = till
    elseif (set.removed and set.live > 0) or set.forget_live then
      redis.call('HDEL', fleet, 'live:' .. set.name)
    end
  end
  if recovery ~= recovery_before then
    fleet_writes[#fleet_writes + 1] = 'recovery'
    fleet_writes[#fleet_writes + 1] = recovery
  end
  redis.call('HSET', fleet, unpack(fleet_writes))
  local answer = {now, recovery, #granted}
  for _, id in ipairs(granted) do answer[#answer + 1] = id end
  for _, value in ipairs(rest) do answer[#answer + 1] = value end
  return answer
end

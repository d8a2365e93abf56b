-- heartbeat: keeps an instance present, claims its configuration, renews its holders, re-adds lost ones, drops the
-- waiters of instances that are gone, forgets those that are long gone, mends what a lost key left inconsistent, grants, and tells the sets' state.
--
-- Guarantees: a holder that really runs is counted again, above N if need be; one whose lease was still valid starts
-- a recovery, since others may be missing too.
--
-- KEYS and ARGV of every writing script: see shared/enter.lua; the sets are distinct
-- ARGV then: subscribed (0 | 1), leaving (0 | 1), within which time instances are to be told ms, and for each set: the
--       override that the caller remembers (or an empty text), an operator's order (slots, - to end it, or an empty text),
--       number of renewals, and for each of them id, route, class (from 1), weight, lapsed (0 | 1)
-- Returns: {-1} if the caller has a newer connection, else
--       {now, start of recovery, what was granted (add_grants), number of pending, pending ids …, number of instances, then
--        for each its id and how long ago it was heard of ms, number of renewals, then for each a code (0 kept, 1
--        re-added), then for each set:
--        slots in force, slots used, waiters, the caller's own waiters, lease in force ms, the override (or an empty text)}

local subscribed, leaving, within = ARGV[arg] == '1', ARGV[arg + 1] == '1', tonumber(ARGV[arg + 2])
arg = arg + 3

-- Silent for so long, an instance has no command under way any more that would arrive, and no lease that would last.
local LONG_GONE, FORGOTTEN_PER_CALL = 86400000, 8

-- The score of an instance is when it was heard of; of one that has left it is when it did, below zero. It stays on the
-- list, since the fence must know its connections for as long as commands may come late.
local before, listed = redis.call('HGET', fleet, 'run'), redis.call('EXISTS', instances) == 1
if last and (before ~= run or not listed) then
  recovery = now
  redis.call('HSET', fleet, 'run', run)
end
if not listed then
  local fields = redis.call('HGETALL', fleet)
  for i = 1, #fields, 2 do
    local instance = string.match(fields[i], '^epoch:(.+)$')
    if instance then redis.call('ZADD', instances, -now, instance) end
  end
end
if leaving then
  redis.call('ZADD', instances, -now, me)
  seen[me] = false
else
  redis.call('ZADD', instances, now, me)
  seen[me] = now
end
redis.call('HSET', fleet, 'sub:' .. me, (subscribed and not leaving) and 1 or 0)

local function forget(from, to)
  for _, instance in ipairs(redis.call('ZRANGE', instances, from, to, 'BYSCORE', 'LIMIT', 0, FORGOTTEN_PER_CALL)) do
    redis.call('ZREM', instances, instance)
    redis.call('HDEL', fleet, 'epoch:' .. instance, 'sub:' .. instance)
  end
end

-- In recovery a clock that jumped, or a server that slept, may make the living look long gone.
if now - recovery > within then
  forget(0, '(' .. (now - LONG_GONE))
  forget('(' .. (LONG_GONE - now), '(0')
  -- Of sets whose keys have expired there is no list, so a few fields are looked at by chance.
  local fields = redis.call('HRANDFIELD', fleet, FORGOTTEN_PER_CALL, 'WITHVALUES')
  for i = 1, #fields, 2 do
    if string.find(fields[i], '^live:') and tonumber(fields[i + 1]) < now - LONG_GONE then
      redis.call('HDEL', fleet, fields[i])
    end
  end
end

local function drop_waiters(set, waiters, instance)
  redis.call('HDEL', set.meta, 'waiters:' .. instance)
  if tonumber(waiters[instance] or '0') == 0 then return end
  waiters[instance] = nil
  for _, class in ipairs(set.classes) do
    local queue = class.queue
    for _, id in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
      local info = info_of(set, id)
      if info and info.instance == instance then
        redis.call('ZREM', queue, id)
        redis.call('HDEL', set.info, id)
        set.waiting = math.max(0, set.waiting - 1)
      end
    end
  end
  redis.call('HSET', set.meta, 'waiting', set.waiting)
end

-- After the slots were lowered: waiters that will never fit ask again, and are told so.
local function drop_too_heavy(set)
  set.lowered = false
  for class = 1, #set.classes do
    local limit = cap(set, class)
    for _, id in ipairs(redis.call('ZRANGE', set.classes[class].queue, 0, -1)) do
      local info = info_of(set, id)
      if info and info.weight > limit then
        dequeue(set, id, class)
        notify(info.instance, id, '')
      end
    end
  end
end

-- After a recovery: members from the future are left over from a clock that went back.
local function sweep(set)
  if recovering(set) or tonumber(redis.call('HGET', set.meta, 'swept') or '0') == recovery then return end
  redis.call('HSET', set.meta, 'swept', recovery)
  local swept = redis.call('ZREMRANGEBYSCORE', set.slots, '(' .. (now + CLOCK_SLACK), '+inf')
  if swept > 0 then
    set.used, set.removed = set.used - swept, true
    redis.call('HSET', set.meta, 'dirty', 1)
  end
end

-- The fields of meta by kind: instance → claim, instance → number of waiters, granted id → instance.
local function fields_of(set)
  local kinds = {claim = {}, waiters = {}, pending = {}}
  local fields = redis.call('HGETALL', set.meta)
  for i = 1, #fields, 2 do
    local kind, rest = string.match(fields[i], '^(%a+):(.+)$')
    if kind then kinds[kind][rest] = fields[i + 1] end
  end
  return kinds
end

local function forget_the_gone(set, meta)
  if leaving then
    drop_waiters(set, meta.waiters, me)
    redis.call('HDEL', set.meta, 'claim:' .. me)
    meta.claim[me] = nil
  end
  for instance, claim in pairs(meta.claim) do
    if instance ~= me and not seen_within(instance, presence) then
      drop_waiters(set, meta.waiters, instance)
      if not seen_within(instance, tonumber(string.match(claim, ' (%d+)$'))) then
        redis.call('HDEL', set.meta, 'claim:' .. instance)
        meta.claim[instance] = nil
      end
    end
  end
  settle_policy(set, meta.claim)
end

local function renew(set, id, route, class, weight, lapsed)
  local kept = redis.call('ZSCORE', set.slots, id)
  if not kept then
    dequeue(set, id, class)
    if not lapsed and not recovering(set) then recovery = now end
  end
  put_slot(set, id, now, weight)
  if redis.call('HEXISTS', set.info, id) == 0 then put_info(set, id, me, class, weight, now, route) end
  return kept and 0 or 1
end

local function is_waiting(set, id)
  for _, class in ipairs(set.classes) do
    if redis.call('ZSCORE', class.queue, id) then return true end
  end
  return false
end

local function count_waiters_anew(set)
  set.waiting = 0
  local counts = {}
  for _, class in ipairs(set.classes) do
    local queue = class.queue
    for _, id in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
      local info = info_of(set, id)
      if info then
        set.waiting = set.waiting + 1
        counts[info.instance] = (counts[info.instance] or 0) + 1
      else
        redis.call('ZREM', queue, id)
      end
    end
  end
  for instance in pairs(fields_of(set).waiters) do redis.call('HDEL', set.meta, 'waiters:' .. instance) end
  for instance, count in pairs(counts) do redis.call('HSET', set.meta, 'waiters:' .. instance, count) end
  redis.call('HSET', set.meta, 'waiting', set.waiting)
end

-- Mends what the loss of a single key, or a purge, left inconsistent.
local function tidy(set, meta)
  for id in pairs(meta.pending) do
    if not redis.call('ZSCORE', set.slots, id) then
      redis.call('HDEL', set.meta, 'pending:' .. id)
      meta.pending[id] = nil
    end
  end
  local total, counted = 0, 0
  for _, class in ipairs(set.classes) do
    local count = redis.call('ZCARD', class.queue)
    if count > 0 then note_queue(set, class) end
    total = total + count
  end
  for _, count in pairs(fields_of(set).waiters) do counted = counted + tonumber(count) end
  if set.waiting ~= total or counted ~= total then count_waiters_anew(set) end
  local dirty = redis.call('HDEL', set.meta, 'dirty') == 1
  if dirty or redis.call('HLEN', set.info) > set.used + set.waiting then
    for _, id in ipairs(redis.call('HKEYS', set.info)) do
      if not redis.call('ZSCORE', set.slots, id) and not is_waiting(set, id) then
        redis.call('HDEL', set.info, id)
      end
    end
  end
end

-- Takes over what an instance remembers, and what an operator orders.
local function obey(set, known, order)
  local text = redis.call('HGET', set.meta, 'override')
  local version = tonumber(string.match(text or '', '^%d+') or '0')
  local theirs = tonumber(string.match(known, '^%d+') or '0')
  if theirs > version then
    redis.call('HSET', set.meta, 'override', known)
    version = theirs
  end
  if order == '' then return end
  local listed, claims = {[set.claimed] = true}, {set.claimed}
  for _, claim in pairs(claims_of(set)) do
    local slots = tonumber(string.match(claim, '^%d+'))
    if not listed[slots] then
      listed[slots] = true
      claims[#claims + 1] = slots
    end
  end
  table.sort(claims)
  local list = order == '-' and '-' or ',' .. table.concat(claims, ',') .. ','
  redis.call('HSET', set.meta, 'override', (version + 1) .. ' ' .. order .. ' ' .. list)
end

local pending, renewed, states = {}, {}, {}
for _, set in ipairs(sets) do
  open(set)
  if not set.noted then see_others(set) end
  obey(set, ARGV[arg], ARGV[arg + 1])
  arg = arg + 2
  if redis.call('HGET', set.meta, 'claim:' .. me) ~= set.claim then claim_policy(set) end
  redis.call('PERSIST', set.slots)
  purge(set)
  sweep(set)
  local meta = fields_of(set)
  forget_the_gone(set, meta)
  if set.lowered then drop_too_heavy(set) end
  local renewals = tonumber(ARGV[arg])
  arg = arg + 1
  for _ = 1, renewals do
    renewed[#renewed + 1] =
      renew(set, ARGV[arg], ARGV[arg + 1], tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3]), ARGV[arg + 4] == '1')
    arg = arg + 5
  end
  tidy(set, meta)
  local mine = {}
  for id, instance in pairs(meta.pending) do
    if instance == me then mine[#mine + 1] = id end
  end
  table.sort(mine)
  for _, id in ipairs(mine) do pending[#pending + 1] = id end
  grant(set)
  local own = tonumber(redis.call('HGET', set.meta, 'waiters:' .. me) or '0')
  local order = redis.call('HGET', set.meta, 'override') or ''
  for _, value in ipairs({set.n, set.used, set.waiting, own, set.lease, order}) do states[#states + 1] = value end
end

for _, id in ipairs(again) do pending[#pending + 1] = id end
local rest = {}
add_grants(rest, granted, fences)
add_list(rest, pending)
local heard = redis.call('ZRANGE', instances, now - within, '+inf', 'BYSCORE', 'WITHSCORES')
rest[#rest + 1] = #heard / 2
for i = 1, #heard, 2 do
  rest[#rest + 1], rest[#rest + 2] = heard[i], now - tonumber(heard[i + 1])
end
add_list(rest, renewed)
for _, value in ipairs(states) do rest[#rest + 1] = value end
return conclude(rest)

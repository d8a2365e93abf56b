-- Shared by all writing scripts: one semaphore's policy, loss, purge; take and give back; the end of an operation.

local run, presence, channel = string.match(ARGV[4], '^(%S*) (%d+) (.*)$')
presence = tonumber(presence)

local sets = {}
for i = 1, set_count do
  local slots = KEYS[2 + i]
  local words = {}
  local policy, classes = string.match(ARGV[5 + 2 * i], '^([^;]*);(.*)$')
  for word in string.gmatch(policy, '%S+') do words[#words + 1] = word end
  local set = {
    name = ARGV[4 + 2 * i], keyed = words[1] == '1', shadow = words[2] == '1', fenced = words[3] == '1', warm = words[4] == '1', recovery = words[5],
    claim = words[6] .. ' ' .. words[7], claimed = tonumber(words[6]),
    grant_ttl = words[8], queue = tonumber(words[9]), ageing = words[10],
    slots = slots, meta = slots .. ':meta', info = slots .. ':info',
    -- The classes that the caller knows, then those that it doesn't (see_others).
    classes = {}, live = tonumber(facts[3 + i] or '0'), till = 0,
  }
  for name, share, room in string.gmatch(classes, '([^ ;]+) ([^ ;]+) (%d+)') do
    set.classes[#set.classes + 1] = {queue = slots .. ':wait:' .. name, name = name, share = share, room = tonumber(room)}
  end
  set.known = #set.classes
  sets[i] = set
end

-- The words of a text as numbers.
local function numbers(text)
  local list = {}
  for word in string.gmatch(text, '%S+') do list[#list + 1] = tonumber(word) end
  return list
end

local seen = {}
local function seen_within(instance, time)
  local at = seen[instance]
  if at == nil then
    at = tonumber(redis.call('ZSCORE', instances, instance) or nil) or false
    seen[instance] = at
  end
  return at and at >= now - time
end

local function cap(set, class)
  return math.min(set.n, math.max(1, math.floor(set.classes[class].share * set.n)))
end

-- Classes in whose queues others wait, but which the caller doesn't know: they come behind those that it knows. Whoever
-- puts the first waiter into a queue notes in meta how its class is called, and its share.
local function see_others(set)
  set.noted = redis.call('HGET', set.meta, 'queues') or ''
  local names, shares = {}, {}
  for name, share in string.gmatch(set.noted, '(%S+) (%S+);') do
    names[#names + 1], shares[name] = name, share
  end
  for class = 1, set.known do shares[set.classes[class].name] = nil end
  table.sort(names)
  for _, name in ipairs(names) do
    if shares[name] then
      set.classes[#set.classes + 1] = {queue = set.slots .. ':wait:' .. name, name = name, share = shares[name], room = 0}
    end
  end
end

local function note_queue(set, class)
  local mark = class.name .. ' ' .. class.share .. ';'
  if string.find(';' .. set.noted, ';' .. mark, 1, true) then return end
  -- Another share than before is noted instead of that.
  local noted = ''
  for name, share in string.gmatch(set.noted, '(%S+) (%S+);') do
    if name ~= class.name then noted = noted .. name .. ' ' .. share .. ';' end
  end
  set.noted = noted .. mark
  redis.call('HSET', set.meta, 'queues', set.noted)
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

-- The slots in force, where the claims alone would say this. A claim of anything that wasn't claimed when an operator
-- set the slots ends that. The override is kept as text: version, slots or -, and the claims with commas around each.
local function overridden(set, claims, claimed)
  local order = redis.call('HGET', set.meta, 'override')
  if not order then return claimed end
  local version, slots, known = string.match(order, '^(%d+) (%S+) (%S+)$')
  if slots == '-' then return claimed end
  for _, claim in pairs(claims) do
    if not string.find(known, ',' .. string.match(claim, '^%d+') .. ',', 1, true) then
      redis.call('HSET', set.meta, 'override', (version + 1) .. ' - -')
      return claimed
    end
  end
  return tonumber(slots)
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
  slots = overridden(set, claims, slots)
  if set.n and set.lease ~= lease then recovery = now end
  local lowered = set.n and slots < set.n
  if set.n ~= slots or set.lease ~= lease then
    set.n, set.lease, set.purged = slots, lease, false
    redis.call('HSET', set.meta, 'slots', slots, 'lease', lease)
  end
  if lowered and slots > 0 then set.lowered = true end
end

-- Drops members whose lease is over: before anyone is refused, made to wait, or granted a slot.
local function purge(set)
  if set.purged or recovering(set) then return end
  set.purged = true
  local purged = redis.call('ZREMRANGEBYSCORE', set.slots, '-inf', '(' .. (now - set.lease))
  if purged > 0 then
    set.used, set.removed = set.used - purged, true
    redis.call('HSET', set.meta, 'dirty', 1)
  end
end

local function claim_policy(set)
  redis.call('HSET', set.meta, 'claim:' .. me, set.claim)
  settle_policy(set, claims_of(set))
end

-- Tells an instance of one of its waiters; the caller hears in the reply. Without a subscription it finds out by counting.
local again, displaced = {}, {}
local function notify(instance, id, notice)
  if instance == me then
    local list = notice == '-' and displaced or again
    list[#list + 1] = id
  elseif redis.call('HGET', fleet, 'sub:' .. instance) == '1' then
    redis.pcall('PUBLISH', channel .. instance, notice .. id)
  end
end

-- Tells every living instance that slots are wanted which it may keep warm; the caller hears in the reply.
local function call_for_slots()
  for _, instance in ipairs(redis.call('ZRANGE', instances, now - presence, '+inf', 'BYSCORE')) do
    if instance ~= me then notify(instance, '', '+') end
  end
end

-- Every operation on a set starts here. What was read of it already is taken from there.
local function open(set, meta, used)
  meta = meta or redis.call('HMGET', set.meta, 'slots', 'lease', 'waiting')
  set.n, set.lease, set.waiting = tonumber(meta[1] or nil), tonumber(meta[2] or nil), tonumber(meta[3] or '0')
  set.used = used or redis.call('ZCARD', set.slots)
  if set.waiting > 0 then see_others(set) end
  local lost = set.live > now and (set.used == 0 or not set.n)
  if not set.n then claim_policy(set) end
  if lost then
    recovery, set.live, set.forget_live = now, 0, true
  end
end

-- Waiters of this class and higher ones.
local function line(set, class)
  local count = 0
  for c = 1, class do count = count + redis.call('ZCARD', set.classes[c].queue) end
  return count
end

-- A number that rises with every grant. It is the fleet's, since the keys of an idle set go, and never below the time in
-- microseconds, should the fleet's be lost as well.
local fences = {}
local function fence(set, id)
  if not set.fenced then return end
  local number = math.max(tonumber(redis.call('HGET', fleet, 'fence') or '0') + 1, now * 1000)
  redis.call('HSET', fleet, 'fence', string.format('%.0f', number))
  fences[#fences + 1] = {id, number}
end

-- The members of a holder of weight w: id, id~2 … id~w.
local function put_slot(set, id, score, weight)
  if score == now then score = now_text end
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
  local name = set.classes[class].name
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
  if redis.call('ZREM', set.classes[class].queue, id) == 0 then return false end
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

-- Adds a list to an answer, with its length in front.
local function add_list(answer, list)
  answer[#answer + 1] = #list
  for _, value in ipairs(list) do answer[#answer + 1] = value end
end

-- What a part of an operation brought: number of granted, granted ids …, number of fences, id and fence of each …
local function add_grants(answer, granted, fences)
  add_list(answer, granted)
  answer[#answer + 1] = #fences
  for _, pair in ipairs(fences) do answer[#answer + 1], answer[#answer + 2] = pair[1], pair[2] end
end

-- Ends an operation: rewrites every set's live_until, the latest end of a lease among members that have an info, that
-- is: our own; then what is known of the fleet. While members come and go it may lie too far ahead, never too near; it goes
-- when the set is empty or holds plain clients alone.
-- Returns {now, start of recovery, rest …}
local function conclude(rest)
  for _, set in ipairs(sets) do
    local idle = set.keyed and set.used == 0 and set.waiting == 0
    if idle then
      redis.call('DEL', set.slots, set.meta, set.info)
    elseif set.keyed then
      local ttl = 2 * set.lease
      redis.call('PEXPIRE', set.slots, ttl)
      redis.call('PEXPIRE', set.meta, ttl)
      redis.call('PEXPIRE', set.info, ttl)
      for _, class in ipairs(set.classes) do redis.call('PEXPIRE', class.queue, ttl) end
    end
    local none = idle or (set.removed and (set.used == 0 or redis.call('HLEN', set.info) == 0))
    if none or (set.forget_live and set.till == 0) then
      redis.call('HDEL', fleet, 'live:' .. set.name)
    elseif set.till > set.live then
      fleet_writes[#fleet_writes + 1] = 'live:' .. set.name
      fleet_writes[#fleet_writes + 1] = set.till + LIVE_STEP
    end
  end
  if recovery ~= recovery_before then
    fleet_writes[#fleet_writes + 1] = 'recovery'
    fleet_writes[#fleet_writes + 1] = recovery
  end
  if #fleet_writes > 0 then redis.call('HSET', fleet, unpack(fleet_writes)) end
  local answer = {now, recovery}
  for _, value in ipairs(rest) do answer[#answer + 1] = value end
  return answer
end

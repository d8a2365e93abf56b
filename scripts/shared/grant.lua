-- Shared by all writing scripts: hands free slots to the best waiters, wherever in the fleet they wait.

local granted = {}

-- The functions inside are made only when somebody waits.
local function grant(set)
  if set.waiting == 0 or recovering(set) then return end
  purge(set)
  local deaf = {}

  -- The first waiter of a class whose instance lives and hears. Waiters of the dead are dropped on the way.
  local function head(class)
    local skip, queue = 0, set.classes[class].queue
    while true do
      local first = redis.call('ZRANGE', queue, skip, skip, 'WITHSCORES')
      local id = first[1]
      if not id then return nil end
      local info = info_of(set, id)
      if info and seen_within(info.instance, presence) then
        if not deaf[info.instance] then
          local waited = math.max(0, now - info.at)
          return {
            effective = math.max(0, math.min(class - 1, set.known) - math.floor(waited / set.ageing)),
            ticket = tonumber(first[2]), class = class, id = id, info = info,
          }
        end
        skip = skip + 1
      else
        redis.call('ZREM', queue, id)
        redis.call('HDEL', set.info, id)
        uncount_waiter(set, info and info.instance)
      end
    end
  end

  local function before(a, b)
    if a.effective ~= b.effective then return a.effective < b.effective end
    if a.ticket ~= b.ticket then return a.ticket < b.ticket end
    return a.class < b.class
  end

  -- The waiter whose turn it is, if a slot may go to it.
  local function next_waiter()
    local heads = {}
    for class = 1, #set.classes do
      heads[#heads + 1] = head(class)
    end
    if #heads > 1 then table.sort(heads, before) end
    for _, first in ipairs(heads) do
      local limit = cap(set, first.class)
      if first.effective < math.min(first.class - 1, set.known) then
        limit = math.max(limit, math.min(cap(set, first.effective + 1), set.n, math.max(1, set.n - 1)))
      end
      if set.used + first.info.weight <= limit then return first end
      -- Blocked by its weight: nobody passes, or a heavy head would starve behind light ones.
      if set.used < limit then return nil end
    end
    return nil
  end

  -- Moves a waiter into the slots. False if its instance doesn't hear and would let the slot lie.
  local function hand_over(first)
    local id, info, score = first.id, first.info, now
    if info.instance == me then
      granted[#granted + 1] = id
      fence(set, id)
    else
      if not told[id] and redis.call('HGET', fleet, 'sub:' .. info.instance) == '1' then
        local heard = redis.pcall('PUBLISH', channel .. info.instance, id)
        if type(heard) ~= 'number' or heard == 0 then return false end
      end
      redis.call('HSET', set.meta, 'pending:' .. id, info.instance)
      score = now - set.lease + set.grant_ttl
    end
    redis.call('ZREM', set.classes[first.class].queue, id)
    uncount_waiter(set, info.instance)
    put_slot(set, id, score, info.weight)
    put_info(set, id, info.instance, first.class, info.weight, now, info.route)
    return true
  end

  for _ = 1, GRANTS_PER_CALL do
    if set.used >= set.n then return end
    local first = next_waiter()
    if not first then return end
    if not hand_over(first) then deaf[first.info.instance] = true end
  end
end

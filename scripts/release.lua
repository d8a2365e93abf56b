-- release: gives back every slot of each id, or its place in a queue; then hands what became free to the best waiters.
-- Joined with acquire.lua, which comes behind it and answers for both.
--
-- Guarantees: idempotent; an id that is unknown frees nothing; each id by itself; the limit isn't read for it.
--
-- KEYS and ARGV of every writing script: see shared/enter.lua
-- ARGV then: number of groups of ids that are alike, and for each group: what they are, how many, and the ids. What they
--       are: class (from 1), queued (0 | 1), index in KEYS of each rate to refund; behind a semicolon set (from 1) and
--       weight of each want
-- Returns: nothing where newcomers follow; else as acquire.lua, with empty lists of what that says
-- Leaves behind: released (a code for each id: 0 released, 1 dequeued, 2 unknown), handed_on and fences_handed_on (granted by it), arg

for _, set in ipairs(sets) do open(set, meta, used) end

local released, handed_on, fences_handed_on = {}, {}, {}
local groups = tonumber(ARGV[arg])
arg = arg + 1
if groups > 0 then
  for _ = 1, groups do
    local class, queued, rates, wants = string.match(ARGV[arg], '^(%d+) (%d)([^;]*);(.*)$')
    class, queued, rates, wants = tonumber(class), queued == '1', numbers(rates), numbers(wants)
    local last_id = arg + 1 + ARGV[arg + 1]
    for i = arg + 2, last_id do
      local id, outcome = ARGV[i], 2
      for _, rate in ipairs(rates) do redis.call('ZREM', KEYS[rate], id) end
      for w = 1, #wants, 2 do
        local one = give_back(sets[wants[w]], id, class, wants[w + 1], queued)
        if outcome == 2 then outcome = one end
      end
      released[#released + 1] = outcome
    end
    arg = last_id + 1
  end
  for _, set in ipairs(sets) do grant(set) end
  handed_on, fences_handed_on, granted, fences = granted, fences, {}, {}
end

-- Most calls that hand slots on bring no newcomers. What only those need isn't even defined then.
if arg > #ARGV then
  local rest = {}
  add_grants(rest, handed_on, fences_handed_on)
  add_list(rest, released)
  add_grants(rest, {}, {})
  add_list(rest, {})
  return conclude(rest)
end

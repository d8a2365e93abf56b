-- release: gives back every slot of each id, or its place in a queue; then hands what became free to the best waiters.
--
-- Guarantees: idempotent; an id that is unknown frees nothing; each id by itself; the limit isn't read for it.
--
-- KEYS and ARGV 1 to 7 and the sets: as in acquire.lua
-- ARGV then for each id: id, class (from 1), queued (0 | 1), number of rates to refund, and index in KEYS of each,
--       number of wants, and set (from 1) and weight of each want
-- Returns: {-1} if the caller has a newer connection, else
--       {now, start of recovery, number of granted, granted ids …, then for each id a code}
--       with code 0 released, 1 dequeued, 2 unknown

for _, set in ipairs(sets) do open(set, meta, used) end

local outcomes = {}
while arg <= #ARGV do
  local id, class, queued, rates = ARGV[arg], tonumber(ARGV[arg + 1]), ARGV[arg + 2] == '1', tonumber(ARGV[arg + 3])
  for r = 1, rates do redis.call('ZREM', KEYS[tonumber(ARGV[arg + 3 + r])], id) end
  local first = arg + rates + 5
  local wants, outcome = tonumber(ARGV[first - 1]), 2
  for w = 1, wants do
    local set = sets[tonumber(ARGV[first + 2 * w - 2])]
    local one = give_back(set, id, class, tonumber(ARGV[first + 2 * w - 1]), queued)
    if outcome == 2 then outcome = one end
  end
  outcomes[#outcomes + 1] = outcome
  arg = first + 2 * wants
end

for _, set in ipairs(sets) do grant(set) end
return conclude(granted, outcomes)

#!lua flags=no-writes,allow-stale
-- holders: who has slots of one set now. Read only, unfenced.
--
-- KEYS: 1 slots  2 meta  3 info
-- ARGV: how many members to look at
-- Returns: for each holder whose lease isn't over: id, instance (empty for a plain client), class, route, slots, ms since
--          it took them (of a plain client: since it last said so)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease = redis.call('HGET', KEYS[2], 'lease')
local oldest = lease and now - tonumber(lease) or '-inf'
local members = redis.call('ZRANGEBYSCORE', KEYS[1], oldest, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[1])

local answer = {}
local function add(...)
  for _, value in ipairs({...}) do answer[#answer + 1] = value end
end

for i = 1, #members, 2 do
  local member, score = members[i], tonumber(members[i + 1])
  local text = redis.call('HGET', KEYS[3], member)
  local instance, class, weight, at, route = string.match(text or '', '^(%S+) (%S+) (%d+) (%-?%d+) (.*)$')
  if instance then
    add(member, instance, class, route, tonumber(weight), math.max(0, now - tonumber(at)))
  else
    -- The further slots of a holder are no holders.
    local first = string.match(member, '^(.+)~%d+$')
    if not first or redis.call('HEXISTS', KEYS[3], first) == 0 then
      add(member, '', '', '', 1, math.max(0, now - score))
    end
  end
end
return answer

-- The well-known counting semaphore on a Redis sorted set, for nginx, and written to be fast: one
-- EVALSHA and one ZREM per request over kept-alive connections, with no client library between, and
-- nginx's cached clock for the score. A request that finds the limit full asks again every 100 ms,
-- as the usual blocking acquire does.
local KEY, LEASE_S, POLL_S, PATIENCE_S, POOL = "sem:bench-lua", 15, 0.1, 60, 1024

local SCRIPT = [[
redis.call("ZREMRANGEBYSCORE", KEYS[1], "-inf", ARGV[1] - ARGV[4] * 1000)
if redis.call("ZCARD", KEYS[1]) < tonumber(ARGV[2]) then
  redis.call("ZADD", KEYS[1], ARGV[1], ARGV[3])
  redis.call("EXPIRE", KEYS[1], ARGV[4] + 1)
  return 1
end
return 0]]
local SHA = ngx.sha1_bin(SCRIPT):gsub(".", function(c) return ("%02x"):format(c:byte()) end)

local function encode(...)
    local args = { ... }
    local parts = { "*" .. #args .. "\r\n" }
    for i, arg in ipairs(args) do
        arg = tostring(arg)
        parts[i + 1] = "$" .. #arg .. "\r\n" .. arg .. "\r\n"
    end
    return table.concat(parts)
end

-- Sends one command, returns the reply's line.
local function call(port, ...)
    local sock = ngx.socket.tcp()
    sock:settimeout(5000)
    assert(sock:connect("127.0.0.1", port))
    assert(sock:send(encode(...)))
    local line = assert(sock:receive())
    sock:setkeepalive(60000, POOL)
    return line
end

local function try(port, slots, id)
    local now = ngx.now() * 1000
    local reply = call(port, "EVALSHA", SHA, 1, KEY, now, slots, id, LEASE_S)
    if reply:find("^-NOSCRIPT") then
        reply = call(port, "EVAL", SCRIPT, 1, KEY, now, slots, id, LEASE_S)
    end
    return reply == ":1"
end

local M = {}

function M.acquire(port, slots)
    local id, deadline = ngx.var.request_id, ngx.now() + PATIENCE_S
    while not try(port, slots, id) do
        if ngx.now() > deadline then return ngx.exit(503) end
        ngx.sleep(POLL_S)
    end
    ngx.ctx.holder = id
end

local function zrem(_, port, id) call(port, "ZREM", KEY, id) end

-- The log phase may not wait for Redis, so a timer of no delay gives the slot back.
function M.release(port)
    if ngx.ctx.holder then assert(ngx.timer.at(0, zrem, port, ngx.ctx.holder)) end
end

return M

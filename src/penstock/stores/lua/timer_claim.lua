-- Takes timers that are due by this server's clock, so that no worker's own clock matters, and
-- pushes their scores to the end of the lease, so that nobody else takes them meanwhile.
-- KEYS: timeline, payloads, state. ARGV: count, lease seconds, bytes at which to stop.
-- Returns: now, the lease's score, seconds until the next one ('' for none), ids without payload,
-- then id, payload, due score and attempt for each timer taken.

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local lease = string.format('%.17g', now + tonumber(ARGV[2]))
local orphans, taken, size = {}, {}, 0

local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.17g', now),
  'WITHSCORES', 'LIMIT', 0, ARGV[1])
for i = 1, #found, 2 do
  local id, due, attempt = found[i], found[i + 1], 1
  local payload = redis.call('HGET', KEYS[2], id)
  if not payload then
    redis.call('ZREM', KEYS[1], id)
    redis.call('HDEL', KEYS[3], id)
    orphans[#orphans + 1] = id
  else
    local held, first_due, attempts =
      string.match(redis.call('HGET', KEYS[3], id) or '', '^(%S+) (%S+) (%d+) %a$')
    -- The score that we gave it ourselves: the same arming, delivered again. With any other
    -- score, somebody armed it anew (or the other library took it, which keeps no state).
    if held and tonumber(held) == tonumber(due) then
      due, attempt = first_due, tonumber(attempts) + 1
    end
    redis.call('ZADD', KEYS[1], lease, id)
    redis.call('HSET', KEYS[3], id, lease .. ' ' .. due .. ' ' .. attempt .. ' l')
    taken[#taken + 1] = {id, payload, due, tostring(attempt)}
    size = size + #payload
    if size >= tonumber(ARGV[3]) then break end
  end
end

-- The other library settles timers without touching the state, so some of it may be left over.
local pending = redis.call('ZCARD', KEYS[1])
if pending == 0 then
  redis.call('UNLINK', KEYS[3])
elseif redis.call('HLEN', KEYS[3]) > pending then
  for _, id in ipairs(redis.call('HRANDFIELD', KEYS[3], 10)) do
    if not redis.call('ZSCORE', KEYS[1], id) then redis.call('HDEL', KEYS[3], id) end
  end
end

local wait = ''
local following = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if following[2] then wait = string.format('%.17g', math.max(0, tonumber(following[2]) - now)) end
return {string.format('%.17g', now), lease, wait, orphans, taken}

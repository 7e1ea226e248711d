-- Ends or lengthens a lease, if it is still the caller's: a timer that was armed anew while its
-- handler ran must outlive the old one's commit.
-- KEYS: timeline, payloads, state, dead. ARGV: id, lease score, SHA-1 of the payload, what to do,
-- then for renew and retry: seconds; for retry: attempts to take off, wake channel; for bury: what
-- happened, as one line, and the name among the dead.
-- Returns the outcome, and for renew the new lease's score.

local id = ARGV[1]
local score = redis.call('ZSCORE', KEYS[1], id)
local payload = redis.call('HGET', KEYS[2], id)
if not score or not payload then return {'gone'} end
local held, due, attempts =
  string.match(redis.call('HGET', KEYS[3], id) or '', '^(%S+) (%S+) (%d+) %a$')
if not held or tonumber(held) ~= tonumber(score) then return {'rearmed'} end
if tonumber(score) ~= tonumber(ARGV[2]) then return {'taken'} end
if redis.sha1hex(payload) ~= ARGV[3] then return {'rearmed'} end

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

if ARGV[4] == 'renew' then
  local lease = string.format('%.17g', now + tonumber(ARGV[5]))
  redis.call('ZADD', KEYS[1], lease, id)
  redis.call('HSET', KEYS[3], id, lease .. ' ' .. due .. ' ' .. attempts .. ' l')
  return {'done', lease}
end
if ARGV[4] == 'retry' then
  local again = string.format('%.17g', now + tonumber(ARGV[5]))
  local begun = string.format('%d', math.max(0, tonumber(attempts) - tonumber(ARGV[6])))
  redis.call('ZADD', KEYS[1], again, id)
  redis.call('HSET', KEYS[3], id, again .. ' ' .. due .. ' ' .. begun .. ' w')
  -- A hint: whoever may not publish to the channel has sleepers that look a little later.
  if redis.call('ZRANGE', KEYS[1], 0, 0)[1] == id then redis.pcall('PUBLISH', ARGV[7], '') end
  return {'done'}
end
if ARGV[4] == 'bury' then
  local heading = {string.format('%.17g', now), due, attempts, ARGV[5], payload}
  redis.call('HSET', KEYS[4], ARGV[6], table.concat(heading, '\n'))
end
redis.call('ZREM', KEYS[1], id)
redis.call('HDEL', KEYS[2], id)
redis.call('HDEL', KEYS[3], id)
return {'done'}

-- Arms a timer, in place of one of the same id. Without its state, no lease on the old one holds
-- any longer, and attempts are counted anew.
-- KEYS: timeline, payloads, state. ARGV: id, payload, 'in' or 'at', seconds, wake channel.
-- Returns the score. Seconds from now are added to this server's time: what counts later.

local score = ARGV[4]
if ARGV[3] == 'in' then
  local time = redis.call('TIME')
  local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
  score = string.format('%.17g', now + tonumber(ARGV[4]))
end
-- A script that is refused a command stops there, and what it did stays. So it reads first what may
-- be of a wrong type; a full server refuses nothing but the first write, which has to be one that
-- takes memory; and the timer is armed at last.
redis.call('HGET', KEYS[3], ARGV[1])
redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('ZADD', KEYS[1], score, ARGV[1])
-- Only the earliest changes when a sleeping worker has to look. A hint: see timer_settle.lua.
if redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[1] then
  redis.pcall('PUBLISH', ARGV[5], '')
end
return score

-- Arms a dead timer again, due at once. One that was armed under its id since is newer, and stays.
-- KEYS: timeline, payloads, state, dead. ARGV: id, wake channel. Returns what became of it.

local value = redis.call('HGET', KEYS[4], ARGV[1])
if not value then return 'unknown' end
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 'pending' end
local _, heading_end = string.find(value, '^[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n')
if not heading_end then return 'unknown' end
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
-- In this order for the reasons that timer_publish.lua has.
redis.call('HGET', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], string.sub(value, heading_end + 1))
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('ZADD', KEYS[1], string.format('%.17g', now), ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
if redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[1] then
  redis.pcall('PUBLISH', ARGV[2], '')
end
return 'redriven'

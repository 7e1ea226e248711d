-- The last position of a stream's log, without sending the entry itself. Its publisher asks with
-- incarnation and term, by which it is seen to be alive.
-- KEYS: log, meta. ARGV: incarnation and term, or nothing.
-- Replies the position, or nil where the log is empty or ends with a foreign id.
local meta = redis.call('HMGET', KEYS[2], 'incarnation', 'term')
if meta[2] and meta[1] == ARGV[1] and meta[2] == ARGV[2] then
  redis.call('HSET', KEYS[2], 'seen', redis.call('TIME')[1])
end
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #tail == 0 then return false end
return string.match(tail[1][1], '^(%d+)%-0$')

-- The last position of a stream's log, without sending the entry itself. Its publisher asks with
-- incarnation and term, by which it is seen to be alive.
-- KEYS: log, meta. ARGV: incarnation and term, or nothing.
-- Replies the position; of an empty log its publisher learns the base, behind which nobody needed
-- anything when it was opened. Nil where the log is empty or ends with a foreign id.
local meta = redis.call('HMGET', KEYS[2], 'incarnation', 'term', 'base')
local is_its_publisher = meta[2] and meta[1] == ARGV[1] and meta[2] == ARGV[2]
if is_its_publisher then
  redis.call('HSET', KEYS[2], 'seen', redis.call('TIME')[1])
end
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #tail == 0 then return is_its_publisher and string.match(meta[3] or '', '^%d+$') end
return string.match(tail[1][1], '^(%d+)%-0$')

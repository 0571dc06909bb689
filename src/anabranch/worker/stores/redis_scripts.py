"""What Redis does by itself, as one step: reads and changes of a key group, many rows at a time.

Rows travel as columns: the sizes of all values, four bytes each, and the values one after the other. Those are two
arguments where there would be thousands, which cost Python more than Redis takes to split a column. In a question,
the sizes begin with "=" if they are all the same: then their number follows, and the size; and with ":" otherwise.
Every script is given the version that its key group must have at least, and answers nothing if Redis has an older one,
or none. A key group has one writer, which numbers its changes by the versions that they are made to: what comes a
second time, because the answer to the first was lost, does nothing, however late it is and whatever has followed.

KEYS[1] is always the head of the key group: a hash with its version and its number of rows.
"""

from __future__ import annotations

_COLUMNS = """
local function cut(sizes, data)
  local values, at = {}, 1
  if string.sub(sizes, 1, 1) == '=' then
    local count, size = struct.unpack('<I4I4', sizes, 2)
    for i = 1, count do
      values[i] = string.sub(data, at, at + size - 1)
      at = at + size
    end
    return values
  end
  for i = 1, (#sizes - 1) / 4 do
    local size = struct.unpack('<I4', sizes, 4 * i - 2)
    values[i] = string.sub(data, at, at + size - 1)
    at = at + size
  end
  return values
end

local packed = {}
local function size_of(number)
  local bytes = packed[number]
  if not bytes then
    bytes = struct.pack('<i4', number)
    packed[number] = bytes
  end
  return bytes
end

local function is_lost(least)
  local version = redis.call('HGET', KEYS[1], 'version')
  return not version or tonumber(version) < tonumber(least)
end

local function is_done(number)
  return tonumber(redis.call('HGET', KEYS[1], 'version')) > tonumber(number)
end

local function changed(rows)
  if rows ~= 0 then redis.call('HINCRBY', KEYS[1], 'rows', rows) end
  return redis.call('HINCRBY', KEYS[1], 'version', 1)
end
"""

#: KEYS: head. ARGV: nothing. Makes the head unless it is there; answers whether it was made, and the version.
BEGIN = """
local made = redis.call('HSETNX', KEYS[1], 'version', 1)
if made == 1 then redis.call('HSET', KEYS[1], 'rows', 0) end
return {made, tonumber(redis.call('HGET', KEYS[1], 'version'))}
"""

#: KEYS: head. ARGV: version. Answers the number of rows.
COUNT = (
    _COLUMNS
    + """
if is_lost(ARGV[1]) then return false end
return tonumber(redis.call('HGET', KEYS[1], 'rows'))
"""
)

#: KEYS: head, values. ARGV: version, bytes, fields (a column).
#: Answers the values (a column; size -1 where there is none) of as many fields as make up that many bytes.
READ_VALUES = (
    _COLUMNS
    + """
if is_lost(ARGV[1]) then return false end
local fields, limit = cut(ARGV[3], ARGV[4]), tonumber(ARGV[2])
local sizes, values, count, bytes, at = {}, {}, 0, 0, 1
while at <= #fields and bytes < limit do
  local last = math.min(at + 99, #fields)
  local found = redis.call('HMGET', KEYS[2], unpack(fields, at, last))
  for i = at, last do
    local value = found[i - at + 1]
    if value then
      count = count + 1
      values[count] = value
      sizes[i] = size_of(#value)
      bytes = bytes + #value
    else
      sizes[i] = size_of(-1)
    end
  end
  at = last + 1
end
return {table.concat(sizes), table.concat(values)}
"""
)

#: KEYS: head, values. ARGV: version, fields to remove, fields to put, their values (columns). Answers the version.
WRITE_VALUES = (
    _COLUMNS
    + """
if is_lost(ARGV[1]) then return false end
if is_done(ARGV[1]) then return tonumber(ARGV[1]) + 1 end
local removed, fields, values = cut(ARGV[2], ARGV[3]), cut(ARGV[4], ARGV[5]), cut(ARGV[6], ARGV[7])
local rows, pairs = 0, {}
if #removed > 0 then rows = -redis.call('HDEL', KEYS[2], unpack(removed)) end
for i = 1, #fields do
  pairs[2 * i - 1] = fields[i]
  pairs[2 * i] = values[i]
end
if #fields > 0 then rows = rows + redis.call('HSET', KEYS[2], unpack(pairs)) end
return changed(rows)
"""
)

#: KEYS: head, values. ARGV: version, cursor, count. Answers the next cursor, fields and values (columns).
SCAN_VALUES = (
    _COLUMNS
    + """
if is_lost(ARGV[1]) then return false end
local found = redis.call('HSCAN', KEYS[2], ARGV[2], 'COUNT', ARGV[3])
local rows, sizes, fields, value_sizes, values = found[2], {}, {}, {}, {}
for i = 1, #rows / 2 do
  fields[i], values[i] = rows[2 * i - 1], rows[2 * i]
  sizes[i], value_sizes[i] = size_of(#fields[i]), size_of(#values[i])
end
return {found[1], table.concat(sizes), table.concat(fields), table.concat(value_sizes), table.concat(values)}
"""
)

#: KEYS: head, the entries of each key. ARGV: version, bytes.
#: Answers the number of entries of each key, sub-keys and values (columns), of as many keys as make up that many bytes.
READ_ENTRIES = (
    _COLUMNS
    + """
if is_lost(ARGV[1]) then return false end
local limit, bytes, count = tonumber(ARGV[2]), 0, 0
local counts, sizes, subkeys, value_sizes, values = {}, {}, {}, {}, {}
for key = 2, #KEYS do
  if bytes >= limit then break end
  local found = redis.call('HGETALL', KEYS[key])
  counts[key - 1] = size_of(#found / 2)
  for i = 1, #found, 2 do
    count = count + 1
    subkeys[count], values[count] = found[i], found[i + 1]
    sizes[count], value_sizes[count] = size_of(#found[i]), size_of(#found[i + 1])
    bytes = bytes + #found[i] + #found[i + 1]
  end
end
return {table.concat(counts), table.concat(sizes), table.concat(subkeys),
        table.concat(value_sizes), table.concat(values)}
"""
)

#: KEYS: head, the set of keys, the entries of each key. ARGV: version, keys (a column), for each key one byte '1' if it
#: is cleared first, for each key how many sub-keys it loses and how many it gets (as sizes), sub-keys to remove, those
#: to put, their values (columns). Answers the version.
WRITE_ENTRIES = (
    _COLUMNS
    + """
if is_lost(ARGV[1]) then return false end
if is_done(ARGV[1]) then return tonumber(ARGV[1]) + 1 end
local keys, removes, puts = cut(ARGV[2], ARGV[3]), ARGV[5], ARGV[6]
local removed, subkeys, values = cut(ARGV[7], ARGV[8]), cut(ARGV[9], ARGV[10]), cut(ARGV[11], ARGV[12])
local rows, removed_at, put_at = 0, 1, 1
for key = 1, #keys do
  local name = KEYS[key + 2]
  local before = redis.call('HLEN', name)
  if string.sub(ARGV[4], key, key) == '1' then redis.call('UNLINK', name) end
  local remove, put = struct.unpack('<I4', removes, 4 * key - 3), struct.unpack('<I4', puts, 4 * key - 3)
  if remove > 0 then redis.call('HDEL', name, unpack(removed, removed_at, removed_at + remove - 1)) end
  removed_at = removed_at + remove
  if put > 0 then
    local pairs = {}
    for i = 1, put do
      pairs[2 * i - 1], pairs[2 * i] = subkeys[put_at + i - 1], values[put_at + i - 1]
    end
    redis.call('HSET', name, unpack(pairs))
  end
  put_at = put_at + put
  local after = redis.call('HLEN', name)
  if after == 0 and before > 0 then redis.call('SREM', KEYS[2], keys[key]) end
  if after > 0 and before == 0 then redis.call('SADD', KEYS[2], keys[key]) end
  rows = rows + after - before
end
return changed(rows)
"""
)

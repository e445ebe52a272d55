// Copies the cached rows of K and V into contiguous arrays, a benchmark's measure of the memory
// alone: rows are found as decode.metal finds them, and no arithmetic hides what that costs.
//
// One thread per vector (grid: vectors of a row, tokens, sequence x KV head).

const int i = thread_position_in_grid.x;
const uint token = thread_position_in_grid.y;
const int seq = thread_position_in_grid.z / KV_HEADS;
const int kv_head = thread_position_in_grid.z % KV_HEADS;
if (token >= uint(TOKENS)) {
    return;
}
vec<T, 4> key = vec<T, 4>(T(0));
vec<T, 4> value = vec<T, 4>(T(0));
if (token < uint(context_lens[seq])) {
#if PAGED
    const int block = block_tables[seq * block_tables_strides[0] + token / BLOCK];
    const int slot = token % BLOCK;
#else
    const int block = seq;
    const int slot = token;
#endif
    const int64_t from = row_offset<KV_HEADS, BLOCK, D>(block, kv_head, slot);
    key = ((const device vec<T, 4>*)(key_pool + from))[i];
    value = ((const device vec<T, 4>*)(value_pool + from))[i];
}
const int64_t to = (int64_t(thread_position_in_grid.z) * TOKENS + token) * (D / 4) + i;
((device vec<T, 4>*)keys)[to] = key;
((device vec<T, 4>*)values)[to] = value;

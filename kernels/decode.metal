// Each sequence's one query token attends over its cached tokens, where they lie.
//
// A threadgroup takes one KV head of one sequence, one split of the sequence's tokens, and the query
// heads that share the KV head (grid: KV head x head split, sequence, split). Its SIMD groups are
// SLICES of the split's tokens times HEAD_GROUPS of HEADS query heads. A SIMD group reads 32 / LANES
// rows at once, LANES lanes to a row, and each row of K and V once for all of its heads.
//
// Every lane group keeps its own running softmax per head: the maximum m so far, the sum l of
// exp2(score - m), and the sum o of exp2(score - m) * V. States of different tokens merge at the
// end: across lanes by shuffles, across slices in threadgroup memory, across splits in merge.metal.

#if QUANTIZED
typedef QuantizedTile<D, KV_HEADS, BLOCK, LANES, VEC, KEYS, BITS, QUANT_GROUP> Rows;
#define POOLS key_codes, key_scales, key_biases, value_codes, value_scales, value_biases
#else
typedef Tile<T, D, KV_HEADS, BLOCK, LANES, VEC, KEYS> Rows;
#define POOLS key_pool, value_pool
#endif
typedef vec<T, VEC> Stored;
typedef vec<float, VEC> Accum;
constexpr int TILE = Rows::TOKENS;
constexpr int ROW_VECS = Rows::ROW_VECS;
constexpr int CHUNKS = Rows::CHUNKS;
constexpr int TEAM = HEADS * HEAD_GROUPS;                  // query heads of a threadgroup
constexpr int HEAD_SPLITS = (GROUP + TEAM - 1) / TEAM;
constexpr int SIMDGROUPS = SLICES * HEAD_GROUPS;

const int kv_head = threadgroup_position_in_grid.x / HEAD_SPLITS;
const int seq = threadgroup_position_in_grid.y;
const int split = threadgroup_position_in_grid.z;
const int head_group = simdgroup_index_in_threadgroup % HEAD_GROUPS;
const int slice = simdgroup_index_in_threadgroup / HEAD_GROUPS;
const int lane = thread_index_in_simdgroup;
const int row_lane = lane % LANES;                         // place in the row
const int row = lane / LANES;                              // which of the rows read at once
const int team_head = (threadgroup_position_in_grid.x % HEAD_SPLITS) * TEAM;
const int first_head = team_head + head_group * HEADS;     // within the group of GROUP heads

const int len = context_lens[seq];
const int first = max(0, len - window);                    // tokens before it aren't seen
const int split_tokens =
    tokens_per_split<SPLIT_SMALLEST, SPLIT_LARGEST, SPLIT_ENOUGH>(len - first);
const int split_begin = first + split * split_tokens;
const int split_end = min(len, split_begin + split_tokens);
#if PARTIAL
if (split_begin >= len) {
    return;  // the whole threadgroup: a shorter sequence than the batch's longest
}
#endif

// Slices are runs of neighbouring tokens, equal up to a tile, so a short split keeps all busy.
const int slice_tiles = (split_end - split_begin + SLICES * TILE - 1) / (SLICES * TILE);
const int begin = split_begin + slice * slice_tiles * TILE;
const int end = min(split_end, begin + slice_tiles * TILE);

// MLX is told not to copy inputs. Where an array isn't in the order that is read here, nothing is
// read and the result is 0 / 0 = NaN, which shows, as numbers from the wrong rows would not.
#if QUANTIZED
const int num_blocks = key_codes_shape[0];
const bool readable = queries_strides[2] == 1 &&
    is_row_contiguous<KV_HEADS, BLOCK, Rows::WORDS>(key_codes_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, Rows::GROUPS>(key_scales_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, Rows::GROUPS>(key_biases_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, Rows::WORDS>(value_codes_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, Rows::GROUPS>(value_scales_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, Rows::GROUPS>(value_biases_strides, num_blocks);
#else
const bool readable = queries_strides[2] == 1 &&
    is_row_contiguous<KV_HEADS, BLOCK, D>(key_pool_strides, key_pool_shape[0]) &&
    is_row_contiguous<KV_HEADS, BLOCK, D>(value_pool_strides, value_pool_shape[0]);
#endif

// Scores are scaled, not q: q stays in its 16-bit type, at half the registers.
const float to_log2 = scale * M_LOG2E_F;
Stored q[HEADS][CHUNKS];
Accum o[HEADS][CHUNKS];
float m[HEADS], l[HEADS];
UNROLL for (int h = 0; h < HEADS; h++) {
    // Where HEADS doesn't divide GROUP the last heads repeat one, and aren't written.
    const int head = kv_head * GROUP + min(first_head + h, GROUP - 1);
    const device Stored* query = (const device Stored*)(
        queries + seq * queries_strides[0] + head * queries_strides[1]);
    UNROLL for (int c = 0; c < CHUNKS; c++) {
        const int i = row_lane + c * LANES;
        q[h][c] = i < ROW_VECS ? query[i] : Stored(T(0));
        o[h][c] = Accum(0);
    }
    m[h] = LOWEST;
    l[h] = 0;
}

#if PAGED
// `auto`: a table of fewer than 8 entries comes in `constant` memory, a longer one in `device`.
const auto blocks = block_tables + seq * block_tables_strides[0];
#else
const int blocks = seq;
#endif

for (int tile = begin; tile < end && readable; tile += TILE) {
    Rows rows;
    if (tile + TILE <= end) {
        rows.template load<true>(POOLS, blocks, kv_head, tile, end, lane);
    } else {
        rows.template load<false>(POOLS, blocks, kv_head, tile, end, lane);
    }
    UNROLL for (int h = 0; h < HEADS; h++) {
        float score[KEYS];
        float top = m[h];
        UNROLL for (int j = 0; j < KEYS; j++) {
            float products = 0;
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                products += dot(Accum(q[h][c]), Accum(rows.k[j][c]));
            }
            score[j] = sum_over_lanes<LANES>(products) * to_log2;
            top = rows.valid[j] ? max(top, score[j]) : top;
        }
        if (top > m[h]) {  // seldom, once the maximum has settled
            const float fade = fast::exp2(m[h] - top);
            m[h] = top;
            l[h] *= fade;
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                o[h][c] *= fade;
            }
        }
        UNROLL for (int j = 0; j < KEYS; j++) {
            const float weight = rows.valid[j] ? fast::exp2(score[j] - m[h]) : 0;
            l[h] += weight;
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                o[h][c] += weight * Accum(rows.v[j][c]);
            }
        }
    }
}

// Across the rows that the SIMD group read at once.
UNROLL for (int step = LANES; step < 32; step *= 2) {
    UNROLL for (int h = 0; h < HEADS; h++) {
        const float other_m = simd_shuffle_xor(m[h], ushort(step));
        const float other_l = simd_shuffle_xor(l[h], ushort(step));
        const float top = max(m[h], other_m);
        const float mine = fast::exp2(m[h] - top), theirs = fast::exp2(other_m - top);
        m[h] = top;
        l[h] = l[h] * mine + other_l * theirs;
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            o[h][c] = o[h][c] * mine + simd_shuffle_xor(o[h][c], ushort(step)) * theirs;
        }
    }
}

// Across slices, one head of every SIMD group at a time: threadgroup memory stays small, so that
// several threadgroups fit on a core.
threadgroup float slice_m[SIMDGROUPS];
threadgroup float slice_l[SIMDGROUPS];
threadgroup Accum slice_o[SIMDGROUPS * ROW_VECS];
UNROLL for (int h = 0; h < HEADS; h++) {
    if (row == 0) {
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            const int i = row_lane + c * LANES;
            if (i < ROW_VECS) {
                slice_o[simdgroup_index_in_threadgroup * ROW_VECS + i] = o[h][c];
            }
        }
    }
    if (lane == 0) {
        slice_m[simdgroup_index_in_threadgroup] = m[h];
        slice_l[simdgroup_index_in_threadgroup] = l[h];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index_in_threadgroup; i < HEAD_GROUPS * ROW_VECS; i += SIMDGROUPS * 32) {
        const int g = i / ROW_VECS;
        const int group_head = team_head + g * HEADS + h;
        if (group_head >= GROUP) {
            continue;
        }
        float top = LOWEST;
        for (int s = 0; s < SLICES; s++) {
            top = max(top, slice_m[s * HEAD_GROUPS + g]);
        }
        float sum = 0;
        Accum mixed = Accum(0);
        for (int s = 0; s < SLICES; s++) {
            const int simdgroup = s * HEAD_GROUPS + g;
            const float weight = fast::exp2(slice_m[simdgroup] - top);
            sum += weight * slice_l[simdgroup];
            mixed += weight * slice_o[simdgroup * ROW_VECS + i % ROW_VECS];
        }
        const int64_t head = int64_t(seq) * KV_HEADS * GROUP + kv_head * GROUP + group_head;
#if PARTIAL
        const int64_t at = head * threadgroups_per_grid.z + split;
        ((device Accum*)partial_out)[at * ROW_VECS + i % ROW_VECS] = mixed;
        if (i % ROW_VECS == 0) {
            partial_stats[at * 2] = top;
            partial_stats[at * 2 + 1] = sum;
        }
#else
        // By length and not by the sum, which would hide a mask that lets NaN through.
        ((device Stored*)out)[head * ROW_VECS + i % ROW_VECS] =
            Stored(len > 0 ? mixed / sum : Accum(0));
#endif
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next head's states land here
}

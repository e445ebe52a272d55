// Each sequence's new tokens attend over its tokens up to themselves, where K and V lie.
//
// A threadgroup takes one KV head and a tile of ROWS rows of one sequence (grid: KV head x head
// split, tile). A row is a new token and one of the HEADS query heads beside each other that share
// the KV head, heads first: what is loaded of K and V serves all of them, and a sequence with one
// new token fills as many rows as it has heads.
//
// KEYS tokens of K and V at a time lie in threadgroup memory. A SIMD group holds 8 rows, their
// queries and outputs as 8x8 matrices in registers. COLUMN_SPLITS of them divide the outputs'
// columns of the same rows, where one would run out of registers; each then takes all the scores.
//
// Where tiles are few and sequences long, a threadgroup takes one split of the keys besides (grid: z),
// and merge.metal joins what the splits leave: for each row and split the maximum m of the scores,
// the sum l of exp2(score - m), and the sum o of exp2(score - m) * V.
//
// A row's bits are its own: keys come in the same tiles whatever rows share them, and the tiles
// that a row doesn't see leave it as it is.

#if QUANTIZED
typedef Piece<T, D, BITS, QUANT_GROUP> RowPiece;
#define KEYS_OF_POOL key_codes, key_scales, key_biases
#define VALUES_OF_POOL value_codes, value_scales, value_biases
#else
typedef Piece<T, D> RowPiece;
#define KEYS_OF_POOL key_pool
#define VALUES_OF_POOL value_pool
#endif
typedef vec<T, 2> Pair;
typedef vec<T, 4> Quad;
constexpr int ROWS = 8 * SIMDGROUPS / COLUMN_SPLITS;
constexpr int HEAD_SPLITS = GROUP / HEADS;
constexpr int DEPTH = D / 8;
constexpr int COLUMNS = DEPTH / COLUMN_SPLITS;             // 8x8 matrices, as DEPTH and KEY_TILES
constexpr int KEY_TILES = KEYS / 8;
constexpr int PIECES = D / RowPiece::ELEMENTS;             // of a row
constexpr int STRIDE = D + 16 / sizeof(T);                 // 16 bytes more: rows in other banks

const int kv_head = threadgroup_position_in_grid.x / HEAD_SPLITS;
const int team_head = kv_head * GROUP + threadgroup_position_in_grid.x % HEAD_SPLITS * HEADS;
const int tile = threadgroup_position_in_grid.y * 4;
const int seq = tiles[tile];
const int first_row = tiles[tile + 1];
const int first_query = tiles[tile + 2];
const int num_queries = tiles[tile + 3];
const int num_cached = context_lens[seq] - num_queries;
const int last_row = min(first_row + ROWS, num_queries * HEADS) - 1;

const int lane = thread_index_in_simdgroup;
const int lane_row = fragment_row(lane);
const int lane_column = fragment_column(lane);
const int part = simdgroup_index_in_threadgroup % COLUMN_SPLITS;
const int simd_row = first_row + simdgroup_index_in_threadgroup / COLUMN_SPLITS * 8;
const int row = min(simd_row + lane_row, last_row);        // past the last it is repeated, unwritten
const int query = row / HEADS;
const int head = team_head + row % HEADS;
const int position = num_cached + query;

// The keys that any row of the threadgroup sees, and of the SIMD group.
#if PARTIAL
const int split = threadgroup_position_in_grid.z;
const int split_begin = split * split_tokens;
const int split_end = split_begin + split_tokens;
#else
const int split_begin = 0;
const int split_end = num_cached + num_queries;
#endif
const int first = max(split_begin, num_cached + first_row / HEADS - window + 1);
const int last = min(split_end - 1, num_cached + last_row / HEADS);
const int simd_first = num_cached + simd_row / HEADS - window + 1;
const int simd_last = simd_row <= last_row ? num_cached + min(simd_row + 7, last_row) / HEADS : -1;

// As in decode.metal: rather NaN than numbers from the wrong rows.
#if QUANTIZED
const int num_blocks = key_codes_shape[0];
const bool readable = queries_strides[2] == 1 &&
    is_row_contiguous<KV_HEADS, BLOCK, RowPiece::ROW_WORDS>(key_codes_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, PIECES>(key_scales_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, PIECES>(key_biases_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, RowPiece::ROW_WORDS>(value_codes_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, PIECES>(value_scales_strides, num_blocks) &&
    is_row_contiguous<KV_HEADS, BLOCK, PIECES>(value_biases_strides, num_blocks);
#else
const bool readable = queries_strides[2] == 1 &&
    is_row_contiguous<KV_HEADS, BLOCK, D>(key_pool_strides, key_pool_shape[0]) &&
    is_row_contiguous<KV_HEADS, BLOCK, D>(value_pool_strides, value_pool_shape[0]);
#endif

const float to_log2 = scale * M_LOG2E_F;
const device Pair* query_row = (const device Pair*)(
    queries + (first_query + query) * queries_strides[0] + head * queries_strides[1]);
Pair q[DEPTH];
UNROLL for (int d = 0; d < DEPTH; d++) {
    q[d] = query_row[d * 4 + lane_column / 2];
}
simdgroup_float8x8 o[COLUMNS];
UNROLL for (int c = 0; c < COLUMNS; c++) {
    o[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
float m = LOWEST;
float l = 0;                                               // of this lane's columns

// `auto`: a table of fewer than 8 entries comes in `constant` memory, a longer one in `device`.
const auto blocks = block_tables + seq * block_tables_strides[0];

threadgroup Quad keys[KEYS * STRIDE / 4];
threadgroup Quad values[KEYS * STRIDE / 4];
const threadgroup T* const key_rows = (const threadgroup T*)keys;

for (int begin = first / KEYS * KEYS; begin <= last && readable; begin += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);       // all have read the tile before
    for (int i = thread_index_in_threadgroup; i < KEYS * PIECES; i += SIMDGROUPS * 32) {
        const int token = begin + i / PIECES;
        const int piece = i % PIECES;
        RowPiece key, value;
        key.clear();
        value.clear();
        // Beyond is nothing to see: the table may hold anything there, a slot NaN.
        if (token >= first && token <= last) {
            const int block = blocks[uint(token) / BLOCK];
            const int64_t at = row_offset<KV_HEADS, BLOCK, 1>(block, kv_head, uint(token) % BLOCK);
            key.load(KEYS_OF_POOL, at, piece);
            value.load(VALUES_OF_POOL, at, piece);
        }
        const int to = i / PIECES * (STRIDE / 4) + piece * (RowPiece::ELEMENTS / 4);
        key.store(keys + to);
        value.store(values + to);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (begin > simd_last || begin + KEYS <= simd_first) {
        continue;                                          // above the diagonal, or before the window
    }

    simdgroup_float8x8 a, b;
    simdgroup_float8x8 scores[KEY_TILES];
    UNROLL for (int k = 0; k < KEY_TILES; k++) {
        scores[k] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    UNROLL for (int d = 0; d < DEPTH; d++) {
        a.thread_elements()[0] = float(q[d].x);
        a.thread_elements()[1] = float(q[d].y);
        UNROLL for (int k = 0; k < KEY_TILES; k++) {
            // Transposed: the matrix's columns are keys.
            const int at = (k * 8 + lane_column) * STRIDE + d * 8 + lane_row;
            b.thread_elements()[0] = float(key_rows[at]);
            b.thread_elements()[1] = float(key_rows[at + STRIDE]);
            simdgroup_multiply_accumulate(scores[k], a, b, scores[k]);
        }
    }
    float top = m;
    UNROLL for (int k = 0; k < KEY_TILES; k++) {
        UNROLL for (int j = 0; j < 2; j++) {
            const int token = begin + k * 8 + lane_column + j;
            const bool sees = token <= position && token > position - window;
            const float score = sees ? scores[k].thread_elements()[j] * to_log2 : LOWEST;
            scores[k].thread_elements()[j] = score;
            top = max(top, score);
        }
    }
    top = row_max(top);
    const float fade = fast::exp2(m - top);
    m = top;
    l *= fade;
    UNROLL for (int k = 0; k < KEY_TILES; k++) {
        UNROLL for (int j = 0; j < 2; j++) {
            const float score = scores[k].thread_elements()[j];
            const float weight = score == LOWEST ? 0 : fast::exp2(score - m);
            scores[k].thread_elements()[j] = weight;
            l += weight;
        }
    }
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        o[c].thread_elements()[0] *= fade;
        o[c].thread_elements()[1] *= fade;
        UNROLL for (int k = 0; k < KEY_TILES; k++) {
            const int at = (k * 8 + lane_row) * STRIDE + (part * COLUMNS + c) * 8 + lane_column;
            const Pair pair = ((const threadgroup Pair*)values)[at / 2];
            b.thread_elements()[0] = float(pair.x);
            b.thread_elements()[1] = float(pair.y);
            simdgroup_multiply_accumulate(o[c], scores[k], b, o[c]);
        }
    }
}

const float sum = row_sum(l);
if (simd_row + lane_row <= last_row) {
    const int64_t out_row = int64_t(first_query + query) * KV_HEADS * GROUP + head;
    const int pair = part * COLUMNS * 4 + lane_column / 2;
#if PARTIAL
    // A row that sees none of the split leaves zeros, and a maximum of LOWEST, which weighs nothing.
    const int64_t at = out_row * threadgroups_per_grid.z + split;
    device float2* to = (device float2*)partial_out + at * (D / 2) + pair;
    if (pair == 0) {
        partial_stats[at * 2] = m;
        partial_stats[at * 2 + 1] = sum;
    }
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        to[c * 4] = float2(o[c].thread_elements()[0], o[c].thread_elements()[1]);
    }
#else
    device Pair* to = (device Pair*)out + out_row * (D / 2) + pair;
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        const float2 mixed = float2(o[c].thread_elements()[0], o[c].thread_elements()[1]);
        to[c * 4] = Pair(mixed / sum);
    }
#endif
}

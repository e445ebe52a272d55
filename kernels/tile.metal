// Rows of K and V on their way through a SIMD group: KEYS for each lane, 32 / LANES times as many
// in all, LANES neighbouring lanes to a row.

template <typename T, int D, int KV_HEADS, int BLOCK, int LANES, int VEC, int KEYS>
struct Tile {
    static constant constexpr int ROWS = 32 / LANES;                        // at once
    static constant constexpr int TOKENS = KEYS * ROWS;
    static constant constexpr int ROW_VECS = D / VEC;
    static constant constexpr int CHUNKS = (ROW_VECS + LANES - 1) / LANES;  // vectors a lane holds

    vec<T, VEC> k[KEYS][CHUNKS];
    vec<T, VEC> v[KEYS][CHUNKS];
    bool valid[KEYS];

    // Tokens from `first` on. A WHOLE tile ends before `end`: then no load hangs on a condition,
    // and all of them are under way at once.
    template <bool WHOLE, typename Blocks>
    void load(const device T* key_pool, const device T* value_pool, Blocks blocks, int kv_head,
              int first, int end, int lane) {
        UNROLL for (int j = 0; j < KEYS; j++) {
            const int token = first + j * ROWS + lane / LANES;
            valid[j] = WHOLE || token < end;
            // Past the end nothing is read: the table may hold anything there, a slot NaN.
#if PAGED
            // Unsigned, so that powers of two become a shift and a mask.
            const int block = valid[j] ? blocks[uint(token) / BLOCK] : 0;
            const int slot = uint(token) % BLOCK;
#else
            const int block = blocks;
            const int slot = token;
#endif
            const int64_t at = row_offset<KV_HEADS, BLOCK, D>(block, kv_head, slot);
            const device vec<T, VEC>* key = (const device vec<T, VEC>*)(key_pool + at);
            const device vec<T, VEC>* value = (const device vec<T, VEC>*)(value_pool + at);
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                const int i = lane % LANES + c * LANES;
                const bool inside = valid[j] && i < ROW_VECS;
                k[j][c] = inside ? key[i] : vec<T, VEC>(T(0));
                v[j][c] = inside ? value[i] : vec<T, VEC>(T(0));
            }
        }
    }
};

// What `Tile` is, for rows of K and V in codes of BITS bits, as MLX's affine format stores them: an
// element is scale * code + bias, with one scale and one bias for each GROUP neighbouring elements.
//
// Rows leave here dequantised, in float, once for all query heads that a SIMD group holds. A row's
// scales and biases are loaded by its first lanes, one each, and go round by shuffles: every byte of
// a row is loaded once.

// Whole bytes of neighbouring codes, as they are loaded at once.
template <int BYTES> struct Packed;
template <> struct Packed<1> { typedef uchar Type; };
template <> struct Packed<2> { typedef ushort Type; };
template <> struct Packed<4> { typedef uint Type; };

template <int D, int KV_HEADS, int BLOCK, int LANES, int VEC, int KEYS, int BITS, int GROUP>
struct QuantizedTile {
    static constant constexpr int ROWS = 32 / LANES;                        // at once
    static constant constexpr int TOKENS = KEYS * ROWS;
    static constant constexpr int ROW_VECS = D / VEC;
    static constant constexpr int CHUNKS = (ROW_VECS + LANES - 1) / LANES;  // vectors a lane holds
    static constant constexpr int WORDS = D * BITS / 32;
    static constant constexpr int GROUPS = D / GROUP;                       // at most LANES
    typedef typename Packed<VEC * BITS / 8>::Type Codes;

    vec<float, VEC> k[KEYS][CHUNKS];
    vec<float, VEC> v[KEYS][CHUNKS];
    bool valid[KEYS];

    // As `Tile::load`. `Floats` are in `constant` memory where a pool has fewer than 8 of them.
    template <bool WHOLE, typename Floats, typename Blocks>
    void load(const device uint* key_codes, Floats key_scales, Floats key_biases,
              const device uint* value_codes, Floats value_scales, Floats value_biases,
              Blocks blocks, int kv_head, int first, int end, int lane) {
        Codes key[KEYS][CHUNKS];
        Codes value[KEYS][CHUNKS];
        float2 key_scale[KEYS];    // and bias, of the group with the number of this lane in its row
        float2 value_scale[KEYS];
        UNROLL for (int j = 0; j < KEYS; j++) {
            const int token = first + j * ROWS + lane / LANES;
            valid[j] = WHOLE || token < end;
            const int block = valid[j] ? blocks[uint(token) / BLOCK] : 0;
            const int64_t row = row_offset<KV_HEADS, BLOCK, 1>(block, kv_head, uint(token) % BLOCK);
            const device Codes* key_row = (const device Codes*)(key_codes + row * WORDS);
            const device Codes* value_row = (const device Codes*)(value_codes + row * WORDS);
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                const int i = lane % LANES + c * LANES;
                const bool inside = valid[j] && i < ROW_VECS;
                key[j][c] = inside ? key_row[i] : Codes(0);
                value[j][c] = inside ? value_row[i] : Codes(0);
            }
            const int64_t at = row * GROUPS + lane % LANES;
            const bool has_group = valid[j] && lane % LANES < GROUPS;
            key_scale[j] = has_group ? float2(key_scales[at], key_biases[at]) : float2(0);
            value_scale[j] = has_group ? float2(value_scales[at], value_biases[at]) : float2(0);
        }
        UNROLL for (int j = 0; j < KEYS; j++) {
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                const int i = lane % LANES + c * LANES;
                const bool inside = valid[j] && i < ROW_VECS;
                const ushort from = lane / LANES * LANES + min(i * VEC / GROUP, GROUPS - 1);
                k[j][c] = dequantized(key[j][c], simd_shuffle(key_scale[j], from), inside);
                v[j][c] = dequantized(value[j][c], simd_shuffle(value_scale[j], from), inside);
            }
        }
    }

    vec<float, VEC> dequantized(Codes codes, float2 scale_and_bias, bool inside) {
        vec<float, VEC> elements;
        UNROLL for (int e = 0; e < VEC; e++) {
            elements[e] = float((uint(codes) >> (e * BITS)) & ((1u << BITS) - 1));
        }
        elements = elements * scale_and_bias.x + scale_and_bias.y;
        return inside ? elements : vec<float, VEC>(0);
    }
};

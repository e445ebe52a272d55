// How a piece of a row of K or V comes from a pool into threadgroup memory: loaded by one thread,
// and stored once every load of its is under way.

#if QUANTIZED
// One group of a row in codes of BITS bits, as MLX's affine format stores it: an element is
// scale * code + bias. What the group takes in memory is loaded once. Elements are rounded to T, as
// if the pool were dequantised before.
template <typename T, int D, int BITS, int GROUP>
struct Piece {
    static constant constexpr int ELEMENTS = GROUP;
    static constant constexpr int GROUPS = D / GROUP;
    static constant constexpr int ROW_WORDS = D * BITS / 32;
    static constant constexpr int QUADS = GROUP * BITS / 128;  // of words
    static constant constexpr int WORD_QUADS = 8 / BITS;       // of elements in a word
    uint4 codes[QUADS];
    float scale, bias;

    void clear() {
        UNROLL for (int i = 0; i < QUADS; i++) {
            codes[i] = uint4(0);
        }
        scale = bias = 0;
    }

    // `Floats` are in `constant` memory where a pool has fewer than 8 of them.
    template <typename Floats>
    void load(const device uint* words, Floats scales, Floats biases, int64_t row, int piece) {
        const device uint4* from = (const device uint4*)(words + row * ROW_WORDS);
        UNROLL for (int i = 0; i < QUADS; i++) {
            codes[i] = from[piece * QUADS + i];
        }
        scale = scales[row * GROUPS + piece];
        bias = biases[row * GROUPS + piece];
    }

    void store(threadgroup vec<T, 4>* to) {
        UNROLL for (int i = 0; i < QUADS * 4 * WORD_QUADS; i++) {
            const uint word = codes[i / WORD_QUADS / 4][i / WORD_QUADS % 4];
            float4 elements;
            UNROLL for (int e = 0; e < 4; e++) {
                elements[e] = float((word >> ((i % WORD_QUADS * 4 + e) * BITS)) & ((1u << BITS) - 1));
            }
            to[i] = vec<T, 4>(elements * scale + bias);
        }
    }
};
#else
template <typename T, int D>
struct Piece {
    static constant constexpr int ELEMENTS = 4;
    vec<T, 4> elements;

    void clear() {
        elements = vec<T, 4>(T(0));
    }

    void load(const device T* pool, int64_t row, int piece) {
        elements = ((const device vec<T, 4>*)(pool + row * D))[piece];
    }

    void store(threadgroup vec<T, 4>* to) {
        to[0] = elements;
    }
};
#endif

// Where the rows of a pool lie: [blocks, KV heads, block size, head dim], row contiguous.

// The first element of a row. In 64 bits: a pool may pass 2^31 elements.
template <int KV_HEADS, int BLOCK, int D>
int64_t row_offset(int block, int kv_head, int slot) {
    return ((int64_t(block) * KV_HEADS + kv_head) * BLOCK + slot) * D;
}

// True if a [blocks, KV_HEADS, BLOCK, D] array lies in memory in that order without gaps. An axis
// of one element is never stepped over, so its stride says nothing.
template <int KV_HEADS, int BLOCK, int D>
bool is_row_contiguous(const constant int64_t* strides, int blocks) {
    return strides[3] == 1 && (BLOCK == 1 || strides[2] == D) &&
        (KV_HEADS == 1 || strides[1] == BLOCK * D) &&
        (blocks == 1 || strides[0] == int64_t(KV_HEADS) * BLOCK * D);
}

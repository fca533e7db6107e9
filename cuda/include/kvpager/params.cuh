// What kernels are told: one struct a kernel family, passed by value.
//
// Strides count elements unless the name says bytes. Pointers are device addresses. The same layouts, field by
// field, are in python/kvpager/attention/_params.py; a test holds the two together.
#pragma once

namespace kvpager {

// One unit of attention work: rows [first_row, first_row + rows of the tile) of a sequence over the positions
// [kv_begin, kv_end). `partial` is the slot for a partial result, or -1 to write the output itself.
struct WorkItem {
  int sequence, first_row, kv_begin, kv_end, partial, unused0, unused1, unused2;
};
// Partial results [first_partial, first_partial + num_partials) of one tile of rows become its output.
struct MergeItem {
  int sequence, first_row, first_partial, num_partials;
};
static_assert(sizeof(WorkItem) == 32 && sizeof(MergeItem) == 16, "the plan is made of these words");

struct AttentionParams {
  const void* query;           // [num_tokens, num_q_heads, head_dim], query_dtype
  const void* k_cache;         // [num_blocks, block_size, num_kv_heads, head_dim]
  const void* v_cache;         // the same
  const float* k_scale;        // fp8: [num_kv_heads] or null; int8: [num_blocks, block_size, num_kv_heads]
  const float* v_scale;        // the same
  const int* block_tables;     // [rows, max_blocks]
  const int* table_rows;       // [num_sequences] or null: sequence i has row i
  const int* query_start;      // [num_sequences + 1]
  const int* context_lens;     // [num_sequences]
  const int* counts;           // [2]: work items, merge items
  const WorkItem* work;
  const MergeItem* merges;
  const float* alibi_slopes;   // [num_q_heads] or null
  const float* sinks;          // [num_q_heads] or null, as scores (natural base)
  void* out;                   // [num_tokens, num_q_heads, head_dim of V], out_dtype
  float* lse;                  // [num_tokens, num_q_heads] or null
  float* partial_out;          // [num_partials, num_kv_heads, tile_rows, head_dim of V]
  float* partial_state;        // [num_partials, num_kv_heads, tile_rows, 2]: maximum (base 2) and sum
  long long query_token_stride, query_head_stride;
  long long k_block_stride, k_slot_stride, k_head_stride;
  long long v_block_stride, v_slot_stride, v_head_stride;
  long long k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride;
  long long v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride;
  long long table_stride;
  long long out_token_stride, out_head_stride;
  long long lse_token_stride, lse_head_stride;
  float scale;                 // of the scores, a scalar k scale included
  float out_scale;             // a scalar v scale, else 1
  float softcap;               // 0: none
  int window;                  // 0: none
  int causal;
  int num_kv_heads;
  int group;                   // query heads of one KV head
  int block_shift;             // log2(block_size)
  int num_blocks;
  int query_dtype, out_dtype;
  int tile_rows;
  int head_dim;                // of V
  int num_sequences;
  int num_tokens;
};

struct AppendParams {
  const void* key;             // [num_tokens, num_kv_heads, head_dim], dtype
  const void* value;           // the same
  void* k_cache;               // [num_blocks, block_size, num_kv_heads, head_dim]
  void* v_cache;
  float* k_scale;              // fp8: [num_kv_heads] or null (read); int8: a scale a token and head (written)
  float* v_scale;
  const long long* slot_mapping;  // [num_tokens]; -1 skips the token
  long long key_token_stride, key_head_stride;
  long long value_token_stride, value_head_stride;
  long long k_block_stride, k_slot_stride, k_head_stride;
  long long v_block_stride, v_slot_stride, v_head_stride;
  long long k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride;
  long long v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride;
  long long num_slots;
  float k_scale_value;         // a scalar scale, else 1
  float v_scale_value;
  int num_tokens;
  int num_kv_heads;
  int head_dim;
  int block_shift;
  int dtype;
  int unused;
};

// Rows of bytes moved between two arrays of blocks, or zeroed. An array of blocks is
// [num_blocks, num_slots, num_heads] rows of row_bytes.
struct BlockParams {
  const void* from[2];         // keys and values; the second may be null
  void* to[2];
  const int* from_ids;         // [num_items], every ids_stride-th word; null: item i is block i
  const int* to_ids;
  long long from_block_bytes[2], from_slot_bytes[2], from_head_bytes[2];
  long long to_block_bytes[2], to_slot_bytes[2], to_head_bytes[2];
  long long from_ids_stride, to_ids_stride;
  int num_items;
  int num_slots;
  int num_heads;
  int row_bytes[2];
  int word_bytes;              // 1, 2, 4, 8 or 16: divides every row, stride and address
  int from_blocks, to_blocks;  // lengths, for the checks
};

struct MergeStatesParams {
  const void* out_a;           // [num_tokens, num_heads, head_dim], dtype
  const void* out_b;
  const float* lse_a;          // [num_tokens, num_heads]
  const float* lse_b;
  const int* b_rows;           // [num_tokens]: which row of b, -1: none; null: the same row
  void* out;                   // out_dtype
  float* lse;                  // or null
  long long a_token_stride, a_head_stride, b_token_stride, b_head_stride, out_token_stride, out_head_stride;
  long long lse_a_token_stride, lse_a_head_stride, lse_b_token_stride, lse_b_head_stride;
  long long lse_token_stride, lse_head_stride;
  int num_tokens;
  int num_heads;
  int head_dim;
  int dtype, out_dtype;
};

// Changed entries of the block tables: (row, column, value, unused) each, as many as *count says.
struct DeltaParams {
  int* block_tables;
  const int* deltas;
  const int* count;
  long long table_stride;
  int capacity;
  int num_rows;
  int max_blocks;
  int unused;
};

}  // namespace kvpager

/*
 * The plan: which CTA attends which rows to which tokens. Pure host code, numbers in, bytes out.
 *
 * A request's packed rows are cut into row tiles (TileShape::rows); the tokens a row tile sees are
 * cut into kv tiles (TileShape::tokens). All kv tiles, row tile after row tile and request after
 * request, form one line, and every CTA of the fixed grid owns one contiguous range of it. From
 * that alone follow the things the kernel relies on:
 *
 *   - Only the first and the last row tile of a range can reach beyond it, so a CTA has at most two
 *     pieces that see a part of their KV: 2 * grid partial slots always suffice (max_slots).
 *   - Slots are counted along the line, so those of one row tile are contiguous and in kv order.
 *
 * Where to cut. If pieces of at most T kv tiles fit one to a CTA, and T exceeds the even share by
 * no more than beginning a second item would cost, every row tile is cut into equal pieces: no CTA
 * then has more than ceil(kv tiles / grid) + floor(item_cost / tile_cost) kv tiles. Where a request
 * is cut then depends on the lengths in the batch but not on their order. Otherwise CTA after CTA
 * is filled up to the smallest capacity, an item costing item_cost + kv tiles * tile_cost, with
 * which the grid suffices. That capacity is at most even + 4 * item_cost + 2 * tile_cost, where
 * even is the cost of all row tiles uncut / grid (find_capacity has the proof), and 2 to 11 % above
 * even for 64 to 256 requests of 1024 to 4096 tokens on 132 to 264 CTAs. A row tile is never cut so
 * that a piece costs less than the item it adds.
 *
 * Time is linear in requests + row tiles + grid, nothing is allocated, and the same input gives the
 * same bytes.
 */
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "params.h"

namespace mla_fp8kv {

// One kernel variant, as far as the plan cares. Costs are times on one SM in any common unit.
struct TileShape {
  int32_t rows;         // packed rows of a row tile
  int32_t tokens;       // tokens of a kv tile
  int32_t ctas_per_sm;  // that are resident together
  float tile_cost;      // of one kv tile
  float item_cost;      // of beginning and ending an item: stage Q, fill the ring, write out
};

// Costs relative to 64 tokens for 8 rows, as measured on one H200 with 32 requests of 8192 tokens.
constexpr TileShape make_tile_shape(int32_t rows, int32_t tokens, int32_t ctas_per_sm, bool wgmma) {
  const float wide = wgmma ? (rows <= 32 ? 1.35f : 1.8f) : (rows <= 32 ? 1.75f : 2.9f);
  const float per_64_tokens = rows <= 8 ? 1.0f : rows <= 16 ? 1.1f : wide;
  return {rows, tokens, ctas_per_sm, per_64_tokens * static_cast<float>(tokens) / 64,
          per_64_tokens * 1.5f};
}

// Launched whatever the lengths are: a CUDA graph replays with other lengths, not another grid.
constexpr int32_t grid_size(const TileShape& tile, int32_t num_sms) {
  return tile.ctas_per_sm * num_sms;
}

constexpr int64_t max_slots(int32_t grid) { return 2 * static_cast<int64_t>(grid); }

struct PlanInput {
  const int32_t* qo_indptr;  // [batch + 1]
  const int32_t* kv_indptr;  // [batch + 1]
  const int32_t* kv_len;     // [batch]
  int32_t batch;
  int32_t num_heads;
  bool causal;  // query i of qo_len sees tokens <= kv_len - qo_len + i
};

enum class PlanStatus : int32_t {
  kOk,
  kBadLaunch,      // a tile or grid that no kernel has
  kNumHeads,       // not positive
  kQoIndptr,       // negative or decreasing
  kKvIndptr,       // negative or decreasing
  kKvLen,          // negative or above kMaxKvLen
  kPackedRows,     // qo_len * num_heads of a request above kMaxPackedRows
  kTooManyItems,   // the work list could not be addressed, whatever the workspace
  kFloatCapacity,  // fewer partial slots than max_slots(grid)
  kIntCapacity,    // the work list does not fit the integer workspace
};

struct PlanResult {
  // Of a plan that succeeded.
  int64_t staged_bytes;  // of the workspace to copy to the device
  int32_t num_items;
  int32_t num_merge_items;
  int32_t num_slots;  // partial slots used
  // Of one that failed.
  int32_t request;  // the request at fault, -1 if it is not one
  int64_t limit;    // capacities: what the plan needs; lengths: the most or least that is supported
  int64_t given;
};

// So that kNotCausal + query stays inside int32.
constexpr int64_t kMaxPackedRows = 0x3fffffff;
// So that byte offsets fit int32.
constexpr int64_t kMaxStagedBytes = 0x7fffffff;

namespace plan_detail {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t align_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct RowTile {
  int32_t request;
  int32_t row_begin;
  int32_t rows;
  int32_t kv_end;  // tokens its last row sees, 0 if none
  int32_t kv_tiles;
};

template <class Visit>
void for_each_row_tile(const PlanInput& in, const TileShape& tile, Visit&& visit) {
  for (int32_t b = 0; b < in.batch; ++b) {
    const int32_t qo_len = in.qo_indptr[b + 1] - in.qo_indptr[b];
    const int32_t rows = qo_len * in.num_heads;
    for (int32_t begin = 0; begin < rows; begin += tile.rows) {
      RowTile t{b, begin, std::min(tile.rows, rows - begin), in.kv_len[b], 0};
      if (in.causal) {
        const int32_t last_query = (begin + t.rows - 1) / in.num_heads;
        t.kv_end = std::max(0, in.kv_len[b] - qo_len + last_query + 1);
      }
      t.kv_tiles = (t.kv_end + tile.tokens - 1) / tile.tokens;
      visit(t);
    }
  }
}

// Costs are counted in 1/16 kv tiles: integers, so that every machine cuts at the same place.
constexpr int64_t kTileUnits = 16;

struct Line {
  int64_t row_tiles = 0;  // that see at least one token
  int64_t kv_tiles = 0;
  int64_t item_units = 0;  // item_cost

  int64_t units() const { return kv_tiles * kTileUnits + row_tiles * item_units; }
  // In kv tiles; a smaller piece costs no more than the item that it adds.
  int64_t least_piece() const { return item_units / kTileUnits + 1; }
};

inline Line measure_line(const PlanInput& in, const TileShape& tile) {
  Line line;
  line.item_units = static_cast<int64_t>(kTileUnits * tile.item_cost / tile.tile_cost + 0.5f);
  for_each_row_tile(in, tile, [&](const RowTile& t) {
    line.row_tiles += t.kv_tiles > 0;
    line.kv_tiles += t.kv_tiles;
  });
  return line;
}

// How the line is cut. Exactly one of the two is positive.
struct Cut {
  int64_t piece_tiles = 0;     // equal pieces of at most this many kv tiles, each a CTA's only item
  int64_t capacity_units = 0;  // CTA after CTA filled up to this cost
};

// Calls piece(row tile, first kv tile, end kv tile, cta) along the line, and unseen(row tile) for
// rows that see no token.
template <class Sink>
void cut_line(const PlanInput& in, const TileShape& tile, const Line& line, const Cut& cut,
              Sink&& sink) {
  int32_t cta = 0;
  int64_t room = cut.capacity_units;
  for_each_row_tile(in, tile, [&](const RowTile& t) {
    if (t.kv_tiles == 0) {
      sink.unseen(t);
    } else if (cut.piece_tiles > 0) {
      const int64_t pieces = ceil_div(t.kv_tiles, cut.piece_tiles);
      for (int64_t i = 0; i < pieces; ++i) {
        sink.piece(t, static_cast<int32_t>(t.kv_tiles * i / pieces),
                   static_cast<int32_t>(t.kv_tiles * (i + 1) / pieces), cta++);
      }
    } else {
      for (int64_t begin = 0; begin < t.kv_tiles;) {
        const int64_t left = t.kv_tiles - begin;
        int64_t take = (room - line.item_units) / kTileUnits;
        if (take >= left) {
          take = left;
        } else {
          take = std::min(take, left - line.least_piece());
          if (take < line.least_piece()) {
            ++cta;
            room = cut.capacity_units;
            continue;
          }
        }
        sink.piece(t, static_cast<int32_t>(begin), static_cast<int32_t>(begin + take), cta);
        begin += take;
        room -= line.item_units + take * kTileUnits;
      }
    }
  });
}

// Counts what there is to write.
struct Counter {
  int64_t items = 0;
  int64_t merge_items = 0;
  int64_t busy_ctas = 0;
  int32_t last_cta = -1;

  void unseen(const RowTile&) { ++merge_items; }
  void piece(const RowTile& t, int32_t begin, int32_t end, int32_t cta) {
    ++items;
    merge_items += begin == 0 && end < t.kv_tiles;
    busy_ctas += cta != last_cta;
    last_cta = cta;
  }
};

// Most kv tiles of a piece when each CTA gets one piece; 0 if that is not worth it.
inline int64_t find_piece_tiles(const PlanInput& in, const TileShape& tile, const Line& line,
                                int32_t grid) {
  if (line.row_tiles > grid) return 0;
  const int64_t even = std::max<int64_t>(1, ceil_div(line.kv_tiles, grid));
  for (int64_t limit = even; limit <= even + line.item_units / kTileUnits; ++limit) {
    int64_t pieces = 0;
    for_each_row_tile(in, tile, [&](const RowTile& t) { pieces += ceil_div(t.kv_tiles, limit); });
    if (pieces <= grid) return limit;
  }
  return 0;
}

// Smallest capacity, to a quarter of a kv tile or 1 % (what finer steps gain, the walks cost), with
// which cut_line fills no more than the grid.
//
// Proof that `most` suffices. A CTA is left when take < least_piece, so with less room than
// item + 2 * least_piece <= 3 * item + 2 kv tiles, and at most one of its items, the first, is the
// continuation of a row tile and so not in units(). Each CTA left has thus taken more than
// most - 4 * item - 2 kv tiles >= units() / grid from the line: fewer than `grid` can be left.
// A capacity of `least` can begin any row tile: it holds two least pieces.
inline int64_t find_capacity(const PlanInput& in, const TileShape& tile, const Line& line,
                             int32_t grid) {
  const int64_t even = ceil_div(line.units(), grid);
  const int64_t most = even + 4 * line.item_units + 2 * kTileUnits;
  int64_t least = std::max(even, line.item_units + 2 * line.least_piece() * kTileUnits);
  int64_t capacity = most;
  while (capacity - least > std::max(kTileUnits / 4, even / 100)) {
    const int64_t middle = (least + capacity) / 2;
    Counter counter;
    cut_line(in, tile, line, Cut{0, middle}, counter);
    (counter.last_cta < grid ? capacity : least) = middle;
  }
  return capacity;
}

// Writes it.
struct Writer {
  const PlanInput& in;
  int32_t kv_tile_tokens;
  CtaWork* ctas;
  MergeItem* merges;
  WorkItem* more;
  int32_t more_begin;  // index of the next further item
  int32_t num_merges = 0;
  int32_t num_slots = 0;

  void unseen(const RowTile& t) {
    merges[num_merges++] = {in.qo_indptr[t.request], t.row_begin, t.rows, 0, 0, {}};
  }

  void piece(const RowTile& t, int32_t begin, int32_t end, int32_t cta) {
    WorkItem item;
    item.q_begin = in.qo_indptr[t.request];
    item.row_begin = t.row_begin;
    item.rows = t.rows;
    item.partial = -1;
    item.page_begin = in.kv_indptr[t.request];
    item.kv_begin = begin * kv_tile_tokens;
    item.kv_end = end == t.kv_tiles ? t.kv_end : end * kv_tile_tokens;
    item.causal_end = kNotCausal;
    if (in.causal) {
      item.causal_end =
          in.kv_len[t.request] - (in.qo_indptr[t.request + 1] - in.qo_indptr[t.request]) + 1;
    }
    if (begin > 0 || end < t.kv_tiles) {
      if (begin == 0) merges[num_merges++] = {item.q_begin, t.row_begin, t.rows, num_slots, 0, {}};
      item.partial = num_slots++;
      ++merges[num_merges - 1].count;
    }

    CtaWork& work = ctas[cta];
    if (work.first.rows == 0) {
      work.first = item;
      return;
    }
    if (work.more_count++ == 0) work.more_begin = more_begin;
    *more++ = item;
    ++more_begin;
  }
};

// Up to this many partials of a row, one warp of the merge reads them all. Beyond, blocks share
// them out, 16 to a row (merge.cuh), which takes about as long as to read 2 * kFewPartials; but if
// there are more such rows than blocks, in as many rounds. There are grid * rows / 8 blocks.
inline int32_t few_partials(const MergeItem* begin, const MergeItem* end, int32_t rows,
                            int32_t grid) {
  int64_t merged_rows = 0;
  for (const MergeItem* item = begin; item != end; ++item) {
    if (item->count > kFewPartials) merged_rows += item->rows;
  }
  const int64_t rounds = ceil_div(16 * 8 * merged_rows, int64_t{grid} * rows);
  return static_cast<int32_t>(2 * kFewPartials * std::max<int64_t>(1, rounds));
}

inline PlanStatus fail(PlanStatus status, int32_t request, int64_t limit, int64_t given,
                       PlanResult& result) {
  result.request = request;
  result.limit = limit;
  result.given = given;
  return status;
}

inline PlanStatus check_input(const PlanInput& in, PlanResult& result) {
  if (in.num_heads <= 0) return fail(PlanStatus::kNumHeads, -1, 1, in.num_heads, result);
  for (int32_t b = 0; b < in.batch; ++b) {
    const int64_t qo_begin = in.qo_indptr[b], qo_end = in.qo_indptr[b + 1];
    const int64_t kv_begin = in.kv_indptr[b], kv_end = in.kv_indptr[b + 1];
    if (qo_begin < 0) return fail(PlanStatus::kQoIndptr, b, 0, qo_begin, result);
    if (kv_begin < 0) return fail(PlanStatus::kKvIndptr, b, 0, kv_begin, result);
    if (qo_end < qo_begin) return fail(PlanStatus::kQoIndptr, b, qo_begin, qo_end, result);
    if (kv_end < kv_begin) return fail(PlanStatus::kKvIndptr, b, kv_begin, kv_end, result);
    if (in.kv_len[b] < 0) return fail(PlanStatus::kKvLen, b, 0, in.kv_len[b], result);
    if (in.kv_len[b] > kMaxKvLen) {
      return fail(PlanStatus::kKvLen, b, kMaxKvLen, in.kv_len[b], result);
    }
    const int64_t rows = (qo_end - qo_begin) * in.num_heads;
    if (rows > kMaxPackedRows) {
      return fail(PlanStatus::kPackedRows, b, kMaxPackedRows, rows, result);
    }
  }
  return PlanStatus::kOk;
}

}  // namespace plan_detail

// The variant with the least work for these requests: an index into `tiles`, which are sorted by
// rows; of equals the one with fewer rows. Any variant can run any input, and what is no valid
// input is for make_plan to refuse.
inline int32_t choose_tile(const PlanInput& in, const TileShape* tiles, int32_t num_tiles) {
  // A CUDA graph keeps the tile of its capture, and frameworks capture with kv_len 1 what they
  // replay with thousands of tokens: short requests must not be what decides.
  constexpr int32_t kLongKv = 1024;
  int32_t best = 0;
  double best_work = 0;
  for (int32_t i = 0; i < num_tiles; ++i) {
    const double token_cost = static_cast<double>(tiles[i].tile_cost) / tiles[i].tokens;
    double work = 0;
    for (int32_t b = 0; b < in.batch; ++b) {
      int64_t qo_len = static_cast<int64_t>(in.qo_indptr[b + 1]) - in.qo_indptr[b];
      double kv_seen = std::max(in.kv_len[b], kLongKv);
      if (in.causal) {
        // The mean over the queries that see any token.
        qo_len = std::min<int64_t>(qo_len, std::max(in.kv_len[b], kLongKv));
        kv_seen -= 0.5 * static_cast<double>(qo_len - 1);
      }
      const int64_t row_tiles = plan_detail::ceil_div(qo_len * in.num_heads, tiles[i].rows);
      work += static_cast<double>(row_tiles) * (kv_seen * token_cost + tiles[i].item_cost);
    }
    if (i == 0 || work < best_work) {
      best = i;
      best_work = work;
    }
  }
  return best;
}

// Writes the work list of params.h to `staged`, the host image of the integer workspace (16-byte
// aligned, `staged_capacity` bytes); the first result.staged_bytes are to be copied to the device.
// On any status but kOk nothing is written.
inline PlanStatus make_plan(const PlanInput& in, const TileShape& tile, int32_t grid,
                            int64_t slot_capacity, void* staged, int64_t staged_capacity,
                            PlanResult& result) {
  using namespace plan_detail;
  result = {};
  if (grid <= 0 || tile.rows <= 0 || tile.tokens <= 0 || !(tile.tile_cost > 0) ||
      !(tile.item_cost >= 0)) {
    return fail(PlanStatus::kBadLaunch, -1, 1, grid, result);
  }
  const PlanStatus status = check_input(in, result);
  if (status != PlanStatus::kOk) return status;
  // Not what this plan uses but what any plan of the grid may use: a replay must not be refused.
  if (slot_capacity < max_slots(grid)) {
    return fail(PlanStatus::kFloatCapacity, -1, max_slots(grid), slot_capacity, result);
  }

  // Before anything walks over the row tiles: there may be billions.
  int64_t row_tiles = 0;
  for (int32_t b = 0; b < in.batch; ++b) {
    const int64_t qo_len = in.qo_indptr[b + 1] - in.qo_indptr[b];
    row_tiles += ceil_div(qo_len * in.num_heads, tile.rows);
  }
  constexpr int64_t item_bytes = sizeof(WorkItem);
  static_assert(sizeof(MergeItem) == item_bytes, "both lists are indexed in steps of one size");
  // Row tiles + 2 a CTA: an item or a merge item for each, and for each cut one of both more.
  const int64_t most_items = (kMaxStagedBytes - merge_offset(grid)) / item_bytes - max_slots(grid);
  if (row_tiles > most_items) {
    return fail(PlanStatus::kTooManyItems, -1, most_items, row_tiles, result);
  }

  const Line line = measure_line(in, tile);
  Cut cut{find_piece_tiles(in, tile, line, grid), 0};
  if (cut.piece_tiles == 0) cut.capacity_units = find_capacity(in, tile, line, grid);
  Counter counter;
  cut_line(in, tile, line, cut, counter);
  const int64_t more_offset =
      merge_offset(grid) + std::max(counter.merge_items, least_merge_items(grid)) * item_bytes;
  const int64_t staged_bytes = more_offset + (counter.items - counter.busy_ctas) * item_bytes;
  if (staged_bytes > staged_capacity) {
    return fail(PlanStatus::kIntCapacity, -1, staged_bytes, staged_capacity, result);
  }

  char* const base = static_cast<char*>(staged);
  std::memset(base, 0, merge_offset(grid) + least_merge_items(grid) * item_bytes);
  Writer writer{in,
                tile.tokens,
                reinterpret_cast<CtaWork*>(base + kCtaWorkOffset),
                reinterpret_cast<MergeItem*>(base + merge_offset(grid)),
                reinterpret_cast<WorkItem*>(base + more_offset),
                static_cast<int32_t>(more_offset / item_bytes)};
  cut_line(in, tile, line, cut, writer);
  auto* const header = reinterpret_cast<PlanHeader*>(base);
  header->num_merge_items = writer.num_merges;
  MergeItem* const merges_end = writer.merges + writer.num_merges;
  const int32_t few_at_most = few_partials(writer.merges, merges_end, tile.rows, grid);
  MergeItem* const few =
      std::partition(writer.merges, merges_end,
                     [few_at_most](const MergeItem& item) { return item.count > few_at_most; });
  header->num_many = static_cast<int32_t>(few - writer.merges);

  result.request = -1;
  result.staged_bytes = staged_bytes;
  result.num_items = static_cast<int32_t>(counter.items);
  result.num_merge_items = writer.num_merges;
  result.num_slots = writer.num_slots;
  return PlanStatus::kOk;
}

// One sentence for a status that is not kOk.
inline std::string plan_error(PlanStatus status, const PlanResult& result) {
  const std::string given = std::to_string(result.given), limit = std::to_string(result.limit);
  const std::string of = " of request " + std::to_string(result.request);
  switch (status) {
    case PlanStatus::kOk:
      return "";
    case PlanStatus::kBadLaunch:
      return "a launch needs a tile and at least one CTA, got a grid of " + given + ".";
    case PlanStatus::kNumHeads:
      return "num_heads must be positive, got " + given + ".";
    case PlanStatus::kQoIndptr:
      return "qo_indptr must not be negative or decrease, got " + given + " where at least " +
             limit + " was expected" + of + ".";
    case PlanStatus::kKvIndptr:
      return "kv_indptr must not be negative or decrease, got " + given + " where at least " +
             limit + " was expected" + of + ".";
    case PlanStatus::kKvLen:
      return "kv_len must be 0.." + std::to_string(kMaxKvLen) + ", got " + given + " as that" + of +
             ".";
    case PlanStatus::kPackedRows:
      return "qo_len * num_heads" + of + " must be at most " + limit + ", got " + given + ".";
    case PlanStatus::kTooManyItems:
      return "the requests need " + given + " row tiles, at most " + limit + " are supported.";
    case PlanStatus::kFloatCapacity:
      return "the float workspace must hold " + limit + " partial results, got room for " + given +
             ".";
    case PlanStatus::kIntCapacity:
      return "the integer workspace must hold " + limit + " bytes for this plan, got " + given +
             ".";
  }
  return "";
}

}  // namespace mla_fp8kv

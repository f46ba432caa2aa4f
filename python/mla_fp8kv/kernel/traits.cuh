/*
 * The shape of a tile: how many rows and tokens one CTA works on, how its warps share them, where things lie in shared
 * memory. Everything is constexpr and free of CUDA, so that host code can ask the same questions.
 *
 * Tokens are M and rows (packed query, head pairs) are N of both matrix products:
 *
 *   S^T [tokens x rows] = K [tokens x d] Q^T [d x rows]       a warp takes kQkBlocks blocks of 16 tokens
 *   O^T [dv x rows]    += V^T [dv x tokens] P^T [tokens x rows]   a warp takes 512 / kWarps dims, all tokens
 *
 * so a CTA widens each FP8 byte once for K and once for V, however many rows it has.
 */
#pragma once
#include <cstdint>

namespace mla_fp8kv {

constexpr int kCkvDim = 512;
constexpr int kChunkBytes = 16;
constexpr int kScaleGroupDims = 128;  // one ckv_scale_arr entry covers this many dims of a token
constexpr int kScaleGroups = kCkvDim / kScaleGroupDims;

template <int Rows, int Warps, int Tokens, int Stages, int QkBlocks, int CtasPerSm, int KpeDim,
          bool GroupScales = false>
struct Tile {
  static constexpr int kRows = Rows;
  static constexpr int kWarps = Warps;
  static constexpr int kThreads = 32 * Warps;
  static constexpr int kTokens = Tokens;
  static constexpr int kStages = Stages;
  static constexpr int kCtasPerSm = CtasPerSm;  // aimed at; a GPU with less shared memory holds fewer
  static constexpr int kKpeDim = KpeDim;
  static constexpr bool kGroupScales = GroupScales;

  static constexpr int kRowTiles = Rows / 8;        // n-tiles of the MMA
  static constexpr int kTokenBlocks = Tokens / 16;  // m-tiles of QK, k-steps of PV
  static constexpr int kQkSteps = (kCkvDim + KpeDim) / 16;
  static constexpr int kCkvSteps = kCkvDim / 16;

  // QK: warps form a grid of token groups x row groups.
  static constexpr int kQkBlocks = QkBlocks;
  static constexpr int kTokenGroups = kTokenBlocks / QkBlocks;
  static constexpr int kRowGroups = Warps / kTokenGroups;
  static constexpr int kQkRowTiles = kRowTiles / kRowGroups;
  // PV: each warp owns a range of dims.
  static constexpr int kWarpDims = kCkvDim / Warps;
  static constexpr int kDimBlocks = kWarpDims / 16;
  // Loads: each warp fetches this many KV rows of a tile.
  static constexpr int kLoadRows = Tokens / Warps;
  // Whether QK of a warp reads rows that other warps fetched: then a tile must have landed one barrier earlier.
  static constexpr bool kSharedLoads = kTokenGroups < Warps;
  // Q: warps that stage the same 8 rows.
  static constexpr int kWarpsPerRowTile = Warps / kRowTiles;
  static constexpr int kQPieces = kQkSteps / kWarpsPerRowTile;  // 4-element pieces of a row a lane stages

  // Shared memory. The 576 B row stride (also without kpe) puts rows 2j and 2j+1 half a bank line apart; XOR of bits 1..2
  // of the row into the low bits of the chunk spreads the four pairs: both ldmatrix forms are free of conflicts.
  static constexpr int kKvRowBytes = kCkvDim + 64;
  static constexpr int kSlotBytes = Tokens * kKvRowBytes;
  static constexpr int kScaleSlotBytes = GroupScales ? Tokens * kScaleGroups * 4 : 0;
  static constexpr int kPRowBytes = 16 * (kRowTiles | 1);  // odd number of 16 B units: conflict-free
  static constexpr int kPBytes = Tokens * kPRowBytes;

  static constexpr int kQOffset = 0;
  static constexpr int kRingOffset = kQOffset + kQkSteps * kRowTiles * 256;
  static constexpr int kScaleRingOffset = kRingOffset + Stages * kSlotBytes;
  static constexpr int kPOffset = kScaleRingOffset + Stages * kScaleSlotBytes;
  static constexpr int kRowOffset = kPOffset + 2 * kPBytes;         // uint32 [tokens], ckv then kpe: where rows lie
  static constexpr int kRowMaxOffset = kRowOffset + 8 * Tokens;     // float [rows]
  static constexpr int kTileMaxOffset = kRowMaxOffset + 4 * Rows;   // float [token groups][rows]
  static constexpr int kSumOffset = kTileMaxOffset;                 // the same shape, at the end of an item
  static constexpr int kFactorOffset = kTileMaxOffset + 4 * kTokenGroups * Rows;  // float [rows]
  static constexpr int kQMaxOffset = kFactorOffset + 4 * Rows;      // float bits [rows]
  static constexpr int kSharedBytes = kQMaxOffset + 4 * Rows;

  static_assert(Rows % 8 == 0 && Tokens % 16 == 0, "rows and tokens come in MMA tiles");
  static_assert(kTokenBlocks % QkBlocks == 0 && Warps % kTokenGroups == 0,
                "QK's warp grid must cover the token blocks");
  static_assert(kRowTiles % kRowGroups == 0, "QK's row groups must have equal shares");
  static_assert(kQkRowTiles == 1 ? kRowTiles == 1 : kQkRowTiles % 2 == 0,
                "Q fragments of two row tiles are fetched at once");
  static_assert(kLoadRows == 8 || kLoadRows == 16, "a warp loads 8 or 16 rows of a tile");
  static_assert(Stages >= (kSharedLoads ? 3 : 2), "the ring must hold a tile in use and one in flight");
  static_assert(QkBlocks <= 2, "QK takes one or two blocks of 16 tokens a warp");
  static_assert(Warps % kRowTiles == 0 && kQkSteps % kWarpsPerRowTile == 0,
                "each warp stages a whole share of one row tile of Q");
  static_assert(!GroupScales || kScaleGroupDims % kWarpDims == 0,
                "a warp's dims must lie in one scale group");
};

// The shipped tiles, fewest rows first. 64 rows need the 227 KB of SM90 and SM100; the others fit every GPU, 99 KB parts
// included. With group scales, sums of one group and of all groups do not both fit the registers beside 32 or 64 rows of
// output: there, CTAs of 16 rows share the items (see attention_kernel).
template <int KpeDim>
struct Tiles {
  using Rows8 = Tile<8, 4, 64, 2, 1, 2, KpeDim>;
  using Rows16 = Tile<16, 4, 64, 2, 1, 2, KpeDim>;
  using Rows32 = Tile<32, 4, 32, 3, 1, 2, KpeDim>;
  using Rows64 = Tile<64, 8, 64, 3, 2, 1, KpeDim>;
  using ScaledRows8 = Tile<8, 4, 64, 2, 1, 2, KpeDim, true>;
  using ScaledRows16 = Tile<16, 4, 64, 2, 1, 2, KpeDim, true>;
};

constexpr int kNumTiles = 4;
constexpr int kSmallestSharedLimit = 101376;  // per block, opt-in: SM86, SM89, SM120, SM121
static_assert(Tiles<64>::ScaledRows8::kSharedBytes <= kSmallestSharedLimit, "8 rows must fit");
static_assert(Tiles<64>::ScaledRows16::kSharedBytes <= kSmallestSharedLimit, "16 rows must fit");
static_assert(Tiles<64>::Rows32::kSharedBytes <= kSmallestSharedLimit, "32 rows must fit");

}  // namespace mla_fp8kv

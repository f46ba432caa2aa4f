/*
 * The shape of a tile: how many rows and tokens one CTA works on, how its warps share them, where
 * things lie in shared memory. Everything is constexpr and free of CUDA, so that host code can ask
 * the same questions.
 *
 * Tokens are M and rows (packed query, head pairs) are N of both matrix products:
 *
 *   S^T [tokens x rows] = K [tokens x d] Q^T [d x rows]       a warp takes kQkBlocks blocks of 16
 * tokens O^T [dv x rows]    += V^T [dv x tokens] P^T [tokens x rows]   a warp takes 512 / kWarps
 * dims, all tokens
 *
 * so a CTA widens each FP8 byte once for K and once for V, however many rows it has.
 */
#pragma once
#include <cstdint>

namespace mla_fp8kv {

constexpr int kCkvDim = 512;
constexpr int kChunkBytes = 16;
constexpr int kKpeRowBytes = 64;      // in shared memory, also without kpe
constexpr int kScaleGroupDims = 128;  // one ckv_scale_arr entry covers this many dims of a token
constexpr int kScaleGroups = kCkvDim / kScaleGroupDims;

template <int Rows, int Warps, int Tokens, int Slots, int QkBlocks, int CtasPerSm, int KpeDim,
          bool GroupScales = false>
struct Tile {
  static constexpr int kRows = Rows;
  static constexpr int kWarps = Warps;
  static constexpr int kThreads = 32 * Warps;
  static constexpr int kTokens = Tokens;
  static constexpr int kCtasPerSm =
      CtasPerSm;  // aimed at; a GPU with less shared memory holds fewer
  static constexpr int kKpeDim = KpeDim;
  static constexpr bool kGroupScales = GroupScales;
  static constexpr bool kWgmma = false;
  // Two warpgroups take turns: staggered_kernel.cuh.
  static constexpr bool kStaggered = Tokens == 128;

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

  // Loads: a warp fetches an equal share of a tile's KV rows into a slot of the ring. If that is
  // just its own token block of QK, it waits for no other warp's.
  static constexpr int kSlots = Slots;
  static constexpr int kWarpTokens = Tokens / Warps;
  static constexpr bool kOwnLoads = kWarpTokens == 16 && kTokenGroups == Warps;

  // Q: warps that stage the same 8 rows, and pieces of 32 dims that one of them does at most.
  static constexpr int kWarpsPerRowTile = Warps / kRowTiles;
  static constexpr int kQPieces = (kQkSteps / 2 + kWarpsPerRowTile - 1) / kWarpsPerRowTile;

  // Shared memory. The 576 B row stride (also without kpe) puts rows 2j and 2j+1 half a bank line
  // apart; XOR of bits 1..2 of the row into the low bits of the chunk spreads the four pairs: both
  // ldmatrix forms are free of conflicts. P rows (one a token, 16 B a row tile) are swizzled to the
  // same end.
  //
  // P of 128 tokens and 64 rows does not fit beside that. There, kpe lies behind all rows of ckv,
  // and half of P takes its place: a warp that has the scores of its tokens needs their kpe no
  // more. The row stride of ckv is 512 B, with XOR of bits 0..2 of the row.
  static constexpr int kKvRowBytes = kCkvDim + (kStaggered ? 0 : kKpeRowBytes);
  static constexpr int kSlotBytes = Tokens * (kCkvDim + kKpeRowBytes);
  static constexpr int kScaleSlotBytes = GroupScales ? Tokens * kScaleGroups * 4 : 0;
  static constexpr int kPRowBytes = 16 * kRowTiles;
  static constexpr int kPBytes = Tokens * kPRowBytes / (kStaggered ? 2 : 1);  // in its own place

  static constexpr int kQOffset = 0;
  static constexpr int kRingOffset = kQOffset + kQkSteps * kRowTiles * 256;
  static constexpr int kScaleRingOffset = kRingOffset + Slots * kSlotBytes;
  static constexpr int kPOffset = kScaleRingOffset + Slots * kScaleSlotBytes;
  // int32 [tokens]: pages of the tile that is loaded next.
  static constexpr int kIndexOffset = kPOffset + kPBytes;
  // Of each warp, while it asks for its rows: uint32 [ckv, kpe(, scale)][rows]. Where a warp loads
  // the tokens whose P it writes, it has that place to itself until it does.
  static constexpr int kLocationBytes = 4 * Tokens * (GroupScales ? 3 : 2);
  static constexpr bool kLocationInP = kOwnLoads && kLocationBytes <= kPBytes;
  static constexpr int kLocationOffset = kLocationInP ? kPOffset : kIndexOffset + 4 * Tokens;
  static constexpr int kLocationStride = (kLocationInP ? kPBytes : kLocationBytes) / Warps;
  // {score units to base-2 logits, reference}: float [rows][2]
  static constexpr int kRowStateOffset =
      kIndexOffset + 4 * Tokens + (kLocationInP ? 0 : kLocationBytes);
  // Never in use at the same time: the tile's maxima and the item's sums (float [rows][token
  // groups]), Q's maxima (float [rows][warps of a row]). Staggered, the former take the place of P.
  static constexpr int kCellsOffset = kRowStateOffset + 8 * Rows;
  static constexpr int kTileMaxOffset = kStaggered ? kPOffset : kCellsOffset;
  static constexpr int kSumOffset = kTileMaxOffset;
  static constexpr int kQMaxOffset = kCellsOffset;
  static constexpr int kCells = kTokenGroups > kWarpsPerRowTile ? kTokenGroups : kWarpsPerRowTile;
  // Staggered: of each warpgroup's half of a tile, float [rows] by which it shrinks what came
  // before, and int32, whether it does.
  static constexpr int kShrinkOffset = kCellsOffset;
  static constexpr int kShrinkBytes = 4 * Rows + 16;
  static constexpr int kSharedBytes =
      kCellsOffset + (kStaggered ? 2 * kShrinkBytes : 4 * Rows * kCells);

  static_assert(Rows % 8 == 0 && Tokens % 16 == 0, "rows and tokens come in MMA tiles");
  static_assert(QkBlocks <= 2 && kTokenBlocks % QkBlocks == 0 && Warps % kTokenGroups == 0,
                "QK's warp grid must cover the token blocks, one or two a warp");
  static_assert(kRowTiles % kRowGroups == 0, "QK's row groups must have equal shares");
  static_assert(kQkRowTiles == 1 ? kRowTiles == 1 : kQkRowTiles % 2 == 0,
                "Q fragments of two row tiles are fetched at once");
  static_assert(kWarpTokens % 8 == 0, "a warp loads groups of 8 KV rows");
  // One tile in use, one in flight; a third, if there is room, where a tile must have landed a
  // barrier before its use.
  static_assert(Slots == 2 || (Slots == 3 && !kOwnLoads),
                "the ring holds two tiles, or three if warps share loads");
  static_assert(Warps % kRowTiles == 0 && kCkvSteps / 2 % kWarpsPerRowTile == 0,
                "each warp stages equal shares of one row tile of q_nope");
  static_assert(!GroupScales || kScaleGroupDims % kWarpDims == 0,
                "a warp's dims must lie in one scale group");
};

// Tiles whose products are wgmma's, which only SM90 has: asynchronous, four warps at once, with Q
// and P read from shared memory by the tensor core itself. The warps' shares are those of mma.sync.
template <int Rows, int Warps, int Tokens, int CtasPerSm, int KpeDim>
struct WgmmaTile : Tile<Rows, Warps, Tokens, 2, 1, CtasPerSm, KpeDim> {
  static constexpr bool kWgmma = true;
  static_assert(WgmmaTile::kTokenGroups == Warps && Warps % 4 == 0,
                "each warp has 16 tokens and all rows, four warps a product");
  static_assert(!WgmmaTile::kStaggered || Rows * 2 * 8 == 16 * kKpeRowBytes,
                "P of 8 of a warp's tokens is as large as kpe of all 16");
  static_assert(WgmmaTile::kDimBlocks % 4 == 0, "four blocks of dims are one group of products");
};

// The shipped tiles, fewest rows first. 64 rows need the 163 KB of SM80 (a third slot, which SM90
// and SM100 could hold, gains nothing), and so does the wide form of 32 rows, for where two CTAs of
// the other do not fit an SM; the others fit every GPU, 99 KB parts included. SM90 takes the wgmma
// tiles instead of those of as many rows (measured there: up to 16 rows they are no faster). With
// group scales, sums of one group and of all groups do not both fit the registers beside 32 or 64
// rows of output: there, CTAs of 16 rows share the items (see attention_kernel).
template <int KpeDim>
struct Tiles {
  using Rows8 = Tile<8, 4, 64, 2, 1, 2, KpeDim>;
  using Rows16 = Tile<16, 4, 64, 2, 1, 2, KpeDim>;
  using Rows32 = Tile<32, 4, 32, 3, 1, 2, KpeDim>;
  using Rows64 = Tile<64, 8, 64, 2, 2, 1, KpeDim>;
  using WideRows32 = Tile<32, 8, 64, 3, 1, 1, KpeDim>;
  using WgmmaRows32 = WgmmaTile<32, 4, 64, 2, KpeDim>;
  using WgmmaRows64 = WgmmaTile<64, 8, 128, 1, KpeDim>;
  using ScaledRows8 = Tile<8, 4, 64, 2, 1, 2, KpeDim, true>;
  using ScaledRows16 = Tile<16, 4, 64, 2, 1, 2, KpeDim, true>;
};

constexpr int kNumTiles = 7;
constexpr int kSharedPerSmSm90 = 233472;
constexpr int kSmallestSharedLimit = 101376;  // per block, opt-in: SM86, SM89, SM120, SM121
constexpr int kSharedLimitSm80 = 166912;
constexpr int kReservedSharedPerCta = 1024;  // by CUDA
static_assert(2 * (Tiles<64>::WgmmaRows32::kSharedBytes + kReservedSharedPerCta) <=
                  kSharedPerSmSm90,
              "two CTAs an SM, to the byte");
static_assert(Tiles<64>::ScaledRows8::kSharedBytes <= kSmallestSharedLimit, "8 rows must fit");
static_assert(Tiles<64>::ScaledRows16::kSharedBytes <= kSmallestSharedLimit, "16 rows must fit");
static_assert(Tiles<64>::Rows32::kSharedBytes <= kSmallestSharedLimit, "32 rows must fit");
static_assert(Tiles<64>::Rows64::kSharedBytes <= kSharedLimitSm80, "64 rows must fit SM80");
static_assert(Tiles<64>::WideRows32::kSharedBytes <= kSharedLimitSm80, "32 wide rows must, too");

}  // namespace mla_fp8kv

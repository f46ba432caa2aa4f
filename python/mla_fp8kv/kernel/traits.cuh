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

  // Loads: a warp fetches 8 KV rows at once, all warps together one slot of the ring. A tile is one
  // slot; or two, and then a warp fetches just the rows of its own token block and waits for no
  // other warp's.
  static constexpr int kSlots = Slots;
  static constexpr int kTileSlots = Tokens / (8 * Warps);
  static constexpr bool kOwnLoads = kTileSlots == 2;
  static constexpr int kBlockRows = 16 / kTileSlots;  // rows of a 16-token block in one slot

  // Q: warps that stage the same 8 rows.
  static constexpr int kWarpsPerRowTile = Warps / kRowTiles;
  static constexpr int kQPieces =
      kQkSteps / kWarpsPerRowTile;  // 4-element pieces of a row a lane stages

  // Shared memory. The 576 B row stride (also without kpe) puts rows 2j and 2j+1 half a bank line
  // apart; XOR of bits 1..2 of the row into the low bits of the chunk spreads the four pairs: both
  // ldmatrix forms are free of conflicts. P rows (one a token, 16 B a row tile) are swizzled to the
  // same end.
  static constexpr int kKvRowBytes = kCkvDim + 64;
  static constexpr int kSlotRows = 8 * Warps;
  static constexpr int kSlotBytes = kSlotRows * kKvRowBytes;
  static constexpr int kScaleSlotBytes = GroupScales ? kSlotRows * kScaleGroups * 4 : 0;
  static constexpr int kPRowBytes = 16 * kRowTiles;
  static constexpr int kPBytes = Tokens * kPRowBytes;

  static constexpr int kQOffset = 0;
  static constexpr int kRingOffset = kQOffset + kQkSteps * kRowTiles * 256;
  static constexpr int kScaleRingOffset = kRingOffset + Slots * kSlotBytes;
  static constexpr int kPOffset = kScaleRingOffset + Slots * kScaleSlotBytes;
  static constexpr int kLocationOffset =
      kPOffset + 2 * kPBytes;  // uint32 [warps][ckv, kpe(, scale)][rows of the warp]
  static constexpr int kLocationBytes = 4 * Tokens * (GroupScales ? 3 : 2);
  static constexpr int kIndexOffset =
      kLocationOffset + kLocationBytes;  // int32 [tokens]: pages of the next tile
  static constexpr int kRowMaxOffset = kIndexOffset + 4 * Tokens;  // float [rows]
  static constexpr int kFactorOffset = kRowMaxOffset + 4 * Rows;   // float [rows]
  // Never in use at the same time: the tile's maxima, the item's sums (float [token groups][rows]),
  // Q's maxima.
  static constexpr int kTileMaxOffset = kFactorOffset + 4 * Rows;
  static constexpr int kSumOffset = kTileMaxOffset;
  static constexpr int kQMaxOffset = kTileMaxOffset;
  static constexpr int kSharedBytes = kTileMaxOffset + 4 * kTokenGroups * Rows;

  static_assert(Rows % 8 == 0 && Tokens % 16 == 0, "rows and tokens come in MMA tiles");
  static_assert(QkBlocks <= 2 && kTokenBlocks % QkBlocks == 0 && Warps % kTokenGroups == 0,
                "QK's warp grid must cover the token blocks, one or two a warp");
  static_assert(kRowTiles % kRowGroups == 0, "QK's row groups must have equal shares");
  static_assert(kQkRowTiles == 1 ? kRowTiles == 1 : kQkRowTiles % 2 == 0,
                "Q fragments of two row tiles are fetched at once");
  static_assert(Tokens % (8 * Warps) == 0 && kTileSlots <= 2, "a tile is one or two slots");
  static_assert(!kOwnLoads || kTokenGroups == Warps,
                "two slots a tile: each warp has its own block");
  // Two tiles: one in use, one in flight; a third where a tile must have landed a barrier before
  // its use. More was not faster, and the page indices of a tile, which come with the tile before
  // it, would have to be waited for.
  static_assert(Slots == (kOwnLoads ? 4 : 3),
                "the ring holds two tiles, or three if warps share loads");
  static_assert(Warps % kRowTiles == 0 && kQkSteps % kWarpsPerRowTile == 0 &&
                    kCkvSteps % kWarpsPerRowTile == 0,
                "each warp stages a whole share of one row tile of Q, of both its parts");
  static_assert(!GroupScales || kScaleGroupDims % kWarpDims == 0,
                "a warp's dims must lie in one scale group");
};

// A tile whose products are wgmma's, which only SM90 has: asynchronous, four warps at once, with Q
// and P read from shared memory by the tensor core itself. The warps' shares are those of mma.sync.
template <int Rows, int KpeDim>
struct WgmmaTile : Tile<Rows, 8, 64, 3, 1, 1, KpeDim> {
  static constexpr bool kWgmma = true;
  static_assert(WgmmaTile::kTokenGroups == 4, "four warps have 16 tokens each");
  static_assert(WgmmaTile::kDimBlocks == 4, "a k-step's dims are one group of products");
};

// The shipped tiles, fewest rows first. 64 rows need the 227 KB of SM90 and SM100; the others fit
// every GPU, 99 KB parts included. SM90 takes the wgmma tiles instead of those of as many rows
// (measured there: up to 16 rows they are no faster). With group scales, sums of one group and of
// all groups do not both fit the registers beside 32 or 64 rows of output: there, CTAs of 16 rows
// share the items (see attention_kernel).
template <int KpeDim>
struct Tiles {
  using Rows8 = Tile<8, 4, 64, 4, 1, 2, KpeDim>;
  using Rows16 = Tile<16, 4, 64, 4, 1, 2, KpeDim>;
  using Rows32 = Tile<32, 4, 32, 3, 1, 2, KpeDim>;
  using Rows64 = Tile<64, 8, 64, 3, 2, 1, KpeDim>;
  using WgmmaRows32 = WgmmaTile<32, KpeDim>;
  using WgmmaRows64 = WgmmaTile<64, KpeDim>;
  using ScaledRows8 = Tile<8, 4, 64, 4, 1, 2, KpeDim, true>;
  using ScaledRows16 = Tile<16, 4, 64, 4, 1, 2, KpeDim, true>;
};

constexpr int kNumTiles = 6;
constexpr int kSmallestSharedLimit = 101376;  // per block, opt-in: SM86, SM89, SM120, SM121
constexpr int kReservedSharedPerCta = 1024;   // by CUDA
static_assert(Tiles<64>::ScaledRows8::kSharedBytes <= kSmallestSharedLimit, "8 rows must fit");
static_assert(Tiles<64>::ScaledRows16::kSharedBytes <= kSmallestSharedLimit, "16 rows must fit");
static_assert(Tiles<64>::Rows32::kSharedBytes <= kSmallestSharedLimit, "32 rows must fit");

}  // namespace mla_fp8kv

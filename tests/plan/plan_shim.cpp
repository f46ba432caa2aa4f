// plan.h and plan_registry.h behind a C interface, for ctypes.
#include <cstddef>
#include <cstring>

#include "plan.h"
#include "plan_registry.h"

using namespace mla_fp8kv;

extern "C" {

int32_t shim_choose_tile(const PlanInput* in, const TileShape* tiles, int32_t num_tiles) {
  return choose_tile(*in, tiles, num_tiles);
}

int32_t shim_make_plan(const PlanInput* in, const TileShape* tile, int32_t grid,
                       int64_t slot_capacity, void* staged, int64_t staged_capacity,
                       PlanResult* result) {
  return static_cast<int32_t>(
      make_plan(*in, *tile, grid, slot_capacity, staged, staged_capacity, *result));
}

void shim_plan_error(int32_t status, const PlanResult* result, char* text, size_t size) {
  std::strncpy(text, plan_error(static_cast<PlanStatus>(status), *result).c_str(), size - 1);
}

void shim_make_tile_shape(int32_t rows, int32_t tokens, int32_t ctas_per_sm, int32_t wgmma,
                          TileShape* tile) {
  *tile = make_tile_shape(rows, tokens, ctas_per_sm, wgmma != 0);
}

int64_t shim_max_slots(int32_t grid) { return max_slots(grid); }
int32_t shim_grid_size(const TileShape* tile, int32_t num_sms) { return grid_size(*tile, num_sms); }

void shim_keep(const PlanOwner* owner, int32_t tile) { plan_registry().keep(*owner, tile); }
int32_t shim_kept(const PlanOwner* owner) { return plan_registry().kept(*owner); }
void shim_forget(const void* int_workspace) { plan_registry().forget(int_workspace); }

// sizeof and the offset of each member, in the order of the structs in params.h.
int32_t shim_layout(int32_t* out) {
  const size_t layout[] = {
      sizeof(WorkItem),
      offsetof(WorkItem, q_begin),
      offsetof(WorkItem, row_begin),
      offsetof(WorkItem, rows),
      offsetof(WorkItem, partial),
      offsetof(WorkItem, page_begin),
      offsetof(WorkItem, kv_begin),
      offsetof(WorkItem, kv_end),
      offsetof(WorkItem, causal_end),
      sizeof(CtaWork),
      offsetof(CtaWork, first),
      offsetof(CtaWork, more_begin),
      offsetof(CtaWork, more_count),
      sizeof(MergeItem),
      offsetof(MergeItem, q_begin),
      offsetof(MergeItem, row_begin),
      offsetof(MergeItem, rows),
      offsetof(MergeItem, slot_begin),
      offsetof(MergeItem, count),
      sizeof(PlanHeader),
      offsetof(PlanHeader, num_merge_items),
      offsetof(PlanHeader, num_many),
      static_cast<size_t>(kCtaWorkOffset),
      static_cast<size_t>(kNotCausal),
      static_cast<size_t>(kMaxKvLen),
  };
  int32_t n = 0;
  for (size_t value : layout) out[n++] = static_cast<int32_t>(value);
  return n;
}
}

"""Stand-ins for the GPU and for the loader of upstream's modules, where each base looks them up."""

from flashinfer_base import FLAT


def upstream(capability, load_module):
    """(object, attribute, value) of everything to replace; the base's package is importable.

    capability: returns (major, minor). load_module: gets a module's key, returns a stand-in.
    """
    if FLAT:
        from flashinfer import mla

        def backend(_device):
            return "fa3" if capability()[0] == 9 else "fa2"

        return [
            (mla, "determine_mla_backend", backend),
            (mla, "get_batch_mla_module", load_module),
        ]

    from flashinfer.mla._batch_mla import _auto_policy, _wrapper
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    def get_capability(_device=None):
        return capability()

    def is_sm90(_device):
        return capability()[0] == 9

    return [
        (_auto_policy, "_get_compute_capability", get_capability),
        (_wrapper, "_get_compute_capability", get_capability),
        (_fa_common, "get_compute_capability", get_capability),
        (_fa_common, "get_device_sm_count", lambda _: 132),
        (_fa_common, "_get_fa_shared_memory_limits", lambda _: (233472, 232448)),
        (_fa_common, "is_sm90a_supported", is_sm90),
        (_auto_policy, "is_sm90a_supported", is_sm90),
        (_auto_policy, "is_sm120a_supported", lambda _: capability() == (12, 0)),
        (_auto_policy, "is_sm121a_supported", lambda _: capability() == (12, 1)),
        (fa2_backend, "get_batch_mla_module", load_module),
        (fa3_backend, "get_batch_mla_module", load_module),
    ]

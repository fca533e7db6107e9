//! Integers that mean different things get different types.

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id_type! {
    /// Physical number of a block in its pool, `0..num_blocks`. Not a handle: it carries no generation.
    BlockId(u32)
}
id_type! {
    /// A quota account of a pool: a tenant's, a group's or the public one.
    AccountId(u32)
}
id_type! {
    /// The set of prefixes that may be shared: (share scope, fingerprint), interned once.
    NamespaceId(u32)
}
id_type! {
    /// One token stream. Never reused. For a request with one sequence it is also the request's id.
    SequenceId(u64)
}
id_type! {
    /// One scheduler turn. Grows by one a step.
    StepId(u64)
}

/// A block as its owner knows it: (generation, id). A handle from before the block's last release is stale,
/// and every call that gets it says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct BlockHandle(u64);

impl BlockHandle {
    /// Packs a generation and an id.
    #[must_use]
    pub const fn new(generation: u32, id: BlockId) -> Self {
        Self(((generation as u64) << 32) | id.0 as u64)
    }

    /// The physical block.
    #[must_use]
    pub const fn id(self) -> BlockId {
        BlockId((self.0 & 0xffff_ffff) as u32)
    }

    /// How often the block had been handed out when this handle was made.
    #[must_use]
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The packed form, as arrays of handles hold it: `generation << 32 | id`.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Reads the packed form. Any value is accepted: the pool checks it when it is used.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Packed handles in place. Any value is accepted: the pool checks it when it is used.
    #[must_use]
    pub const fn slice_from_bits(bits: &[u64]) -> &[Self] {
        // SAFETY: `BlockHandle` is a transparent `u64`, and every value of it is a handle.
        unsafe { std::slice::from_raw_parts(bits.as_ptr().cast(), bits.len()) }
    }

    /// Packed handles in place, to be written.
    #[must_use]
    pub const fn slice_from_bits_mut(bits: &mut [u64]) -> &mut [Self] {
        // SAFETY: as in `slice_from_bits`; every handle is a valid `u64` too.
        unsafe { std::slice::from_raw_parts_mut(bits.as_mut_ptr().cast(), bits.len()) }
    }
}

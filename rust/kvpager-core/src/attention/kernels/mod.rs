//! The inner loops, once for each instruction set, chosen at run time.
//!
//! `tile.rs` and `softmax.rs` hold the one text of the algorithm as macros; each instruction set's file supplies vectors of
//! `LANES` floats and instantiates them with its `#[target_feature]` on every function, since an intrinsic inside
//! a function without it stays a call.

use std::sync::OnceLock;

#[macro_use]
mod softmax;
#[macro_use]
mod tile;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

/// Keys that a tile holds at most.
pub(super) const TILE: usize = 32;

/// Rows are padded to a multiple of this many elements, the widest vector.
pub(super) const ROW_ALIGN: usize = 16;

/// Running maximum, in magnitude, from which the scores of fp32 outputs are refined; below it their rounding stays
/// well inside the bound of 1e-6.
const EXACT_ABOVE: f32 = 5.0;

/// How far below the maximum a score still weighs enough for its rounding to show, which grows with the score.
fn exact_within(highest: f32, has_slopes: bool) -> f32 {
    // With ALiBi the products may be larger than the scores that they end up in.
    if has_slopes { 8.0 } else { 2.5 + highest.abs().ln() }
}

/// How a row of keys or values is stored in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    F32,
    F16,
    Bf16,
    /// The same bytes, read in the order of pairs.
    Bf16Pairs,
}

/// One visit of some query rows to at most [`TILE`] keys of one KV head.
///
/// Row `t` of the keys is at `keys[t] + key_offset`, and of the values at `values[t] + value_offset`; both
/// pointer arrays have `TILE` entries, those past `num_keys` repeating a valid one.
pub(super) struct Tile {
    /// `[num_rows, key_dim]`, not scaled.
    pub(super) query: *const f32,
    pub(super) num_rows: usize,
    /// Multiples of [`ROW_ALIGN`].
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) keys: *const *const u8,
    pub(super) values: *const *const u8,
    pub(super) key_offset: isize,
    pub(super) value_offset: isize,
    pub(super) num_keys: usize,
    /// `TILE` rows each to fetch while this tile is computed, with their offsets; null when there are none.
    pub(super) next_keys: *const *const u8,
    pub(super) next_values: *const *const u8,
    pub(super) next_key_offset: isize,
    pub(super) next_value_offset: isize,
    /// `[num_rows]`: first and end of the keys of this tile that the row sees.
    pub(super) visible: *const [u32; 2],
    /// `[num_rows]`: ALiBi slope, and the distance from the row's position to the tile's first key.
    pub(super) slopes: *const f32,
    pub(super) distances: *const f32,
    pub(super) has_slopes: bool,
    /// Factor of the products.
    pub(super) scale: f32,
    /// Whether large scores are refined, for an output of fp32.
    pub(super) exact: bool,
    /// Cap of the scores, 0 for none.
    pub(super) softcap: f32,
    /// Scratch `[num_rows, TILE]`: products, then scores, then weights.
    pub(super) scores: *mut f32,
    /// Scratch `[num_rows]`.
    pub(super) rescale: *mut f32,
    /// Running state: `[num_rows]`, `[num_rows]`, `[num_rows, value_dim]`.
    pub(super) max: *mut f32,
    pub(super) sum: *mut f32,
    pub(super) acc: *mut f32,
}

/// The functions of one instruction set. Each may be called only where the processor has it.
pub(super) struct Kernels {
    pub(super) name: &'static str,
    /// Floats of a vector.
    pub(super) lanes: usize,
    pub(super) attend_f32: unsafe fn(&Tile),
    pub(super) attend_f16: unsafe fn(&Tile),
    pub(super) attend_bf16: unsafe fn(&Tile),
    pub(super) attend_bf16_pairs: unsafe fn(&Tile),
    /// Decodes `count` elements without gaps: (source, target, count, dtype).
    pub(super) decode_row: unsafe fn(*const u8, *mut f32, usize, super::Dtype),
    /// Decodes `count` bf16 elements without gaps in the order of pairs: (source, target, count).
    pub(super) decode_pairs: unsafe fn(*const u8, *mut f32, usize),
}

impl Kernels {
    pub(super) fn attend(&self, storage: Storage) -> unsafe fn(&Tile) {
        match storage {
            Storage::F32 => self.attend_f32,
            Storage::F16 => self.attend_f16,
            Storage::Bf16 => self.attend_bf16,
            Storage::Bf16Pairs => self.attend_bf16_pairs,
        }
    }
}

/// Instruction sets of this processor, the fastest first.
fn available() -> Vec<&'static Kernels> {
    let mut all: Vec<&'static Kernels> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if avx512::is_available() {
            all.push(&avx512::KERNELS);
        }
        if avx2::is_available() {
            all.push(&avx2::KERNELS);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if neon::is_available() {
        all.push(&neon::KERNELS);
    }
    all.push(&scalar::KERNELS);
    all
}

fn all() -> &'static [&'static Kernels] {
    static ALL: OnceLock<Vec<&'static Kernels>> = OnceLock::new();
    ALL.get_or_init(available)
}

/// Names of the instruction sets of this processor, the fastest first.
#[must_use]
pub fn instruction_sets() -> Vec<&'static str> {
    all().iter().map(|kernels| kernels.name).collect()
}

/// The kernels with this name, or the fastest.
pub(super) fn select(name: Option<&str>) -> Option<&'static Kernels> {
    match name {
        None => all().first().copied(),
        Some(name) => all().iter().copied().find(|kernels| kernels.name == name),
    }
}

//! Online softmax attention over one tile, the text that every instruction set shares.
//!
//! The including file defines `V`, `LANES` and, each with the same target features: `zero`, `splat`, `load`,
//! `store`, `fma` (`a * b + c`), `neg_fma` (`c - a * b`), `add`, `mul`, `div`, `vmax` (NaN of the second operand
//! wins), `round`, `pow2` (2^x of a whole x), `lane_numbers`, `keep_between(v, x, low, high)` (`v` where
//! `low <= x < high`, else -inf), `zero_below(v, x, low)` (0 where `x < low`), `pick_below(x, limit, a, b)`,
//! `reduce` (lane i of the result is the sum of vector i), `sum`, `maximum`, `load_f16`, `load_bf16`,
//! `load_pairs` (the elements with even numbers, and those with odd ones, of `2 * LANES` bf16),
//! `prefetch`.
//!
//! bf16 rows are read in the *order of pairs* where their length allows it: of `2 * LANES` elements first the even
//! ones (a shift of each 32-bit word), then the odd ones (a mask), half the instructions of widening them in order.
//! The query is packed in the same order, and outputs are put back into theirs.
//!
//! Memory: the scores of one tile (`rows x TILE`), the accumulators in registers in blocks of `R` rows and `C`
//! vectors. Each row's arithmetic is the same whatever rows share its tile, so results do not depend on how a
//! batch was put together.

/// Instantiates the tile kernels with the given target features.
macro_rules! tile_kernels {
    ($features:literal) => {
        use crate::attention::kernels::{EXACT_ABOVE, TILE, Tile, exact_within};

        softmax_kernels!($features);

        const STORED_F32: u8 = 0;
        const STORED_F16: u8 = 1;
        const STORED_BF16: u8 = 2;
        const STORED_BF16_PAIRS: u8 = 3;

        /// `LANES` elements of a stored row from element `index` on.
        ///
        /// # Safety
        /// They are readable.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn load_stored<const KIND: u8>(row: *const u8, index: usize) -> V {
            // SAFETY: readable by the caller's promise.
            unsafe {
                match KIND {
                    STORED_F32 => load(row.cast::<f32>().add(index)),
                    STORED_F16 => load_f16(row.cast::<u16>().add(index)),
                    _ => load_bf16(row.cast::<u16>().add(index)),
                }
            }
        }

        const fn stored_size(kind: u8) -> usize {
            if kind == STORED_F32 { 4 } else { 2 }
        }

        /// Fetches the cache line of element `index` of a row, where a vector of the row begins a line.
        #[inline]
        #[target_feature(enable = $features)]
        fn fetch_vector<const KIND: u8>(row: *const u8, index: usize) {
            let at = index * stored_size(KIND);
            if at % 64 == 0 {
                prefetch(row.wrapping_add(at));
            }
        }

        /// Scores of `R` rows and `T` keys, `R * T == LANES`.
        ///
        /// # Safety
        /// `tile` is as its type says; `row + R <= num_rows` and `key + T <= TILE`.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn score_block<const KIND: u8, const R: usize, const T: usize, const FETCH: bool>(
            tile: &Tile,
            row: usize,
            key: usize,
        ) {
            let mut acc = [zero(); LANES];
            let mut rows = [std::ptr::null::<u8>(); T];
            let mut next = [std::ptr::null::<u8>(); T];
            // SAFETY: the pointers and rows are inside their arrays by the caller's promise.
            unsafe {
                for t in 0..T {
                    rows[t] = (*tile.keys.add(key + t)).wrapping_offset(tile.key_offset);
                    if FETCH {
                        next[t] = (*tile.next_keys.add(key + t)).wrapping_offset(tile.next_key_offset);
                    }
                }
                let query = tile.query.add(row * tile.key_dim);
                let mut d = 0;
                while d < tile.key_dim {
                    if FETCH {
                        for t in 0..T {
                            fetch_vector::<KIND>(next[t], d);
                        }
                    }
                    let mut k = [zero(); T];
                    let mut odd = [zero(); T];
                    for t in 0..T {
                        if KIND == STORED_BF16_PAIRS {
                            (k[t], odd[t]) = load_pairs(rows[t].cast::<u16>().add(d));
                        } else {
                            k[t] = load_stored::<KIND>(rows[t], d);
                        }
                    }
                    for r in 0..R {
                        let q = load(query.add(r * tile.key_dim + d));
                        for t in 0..T {
                            acc[r * T + t] = fma(q, k[t], acc[r * T + t]);
                        }
                    }
                    if KIND == STORED_BF16_PAIRS {
                        d += LANES;
                        for r in 0..R {
                            let q = load(query.add(r * tile.key_dim + d));
                            for t in 0..T {
                                acc[r * T + t] = fma(q, odd[t], acc[r * T + t]);
                            }
                        }
                    }
                    d += LANES;
                }
                let mut sums = [0.0f32; LANES];
                store(sums.as_mut_ptr(), reduce(acc));
                for r in 0..R {
                    let target = tile.scores.add((row + r) * TILE + key);
                    sums.as_ptr().add(r * T).copy_to_nonoverlapping(target, T);
                }
            }
        }

        /// Scores of `R` rows and all keys of the tile, the last block padded by repeated keys. Fetches the next
        /// keys where `row` is 0.
        ///
        /// # Safety
        /// As for `score_block`.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn score_rows<const KIND: u8, const R: usize, const T: usize>(tile: &Tile, row: usize) {
            let fetch = row == 0 && !tile.next_keys.is_null();
            let mut key = 0;
            while key < tile.num_keys {
                // SAFETY: `T` divides `TILE`, so `key + T <= TILE`; `next_keys` has `TILE` entries.
                unsafe {
                    if fetch {
                        score_block::<KIND, R, T, true>(tile, row, key);
                    } else {
                        score_block::<KIND, R, T, false>(tile, row, key);
                    }
                }
                key += T;
            }
        }

        /// Adds the weighted values of `R` rows to `C` vectors of their accumulators from element `d` on. The tile is
        /// summed apart first: where one key outweighs all others, adding the small ones to it one by one would
        /// round each of them at its magnitude.
        ///
        /// # Safety
        /// `tile` is as its type says, `row + R <= num_rows` and `d + C * LANES <= value_dim`.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn value_block<const KIND: u8, const R: usize, const C: usize>(
            tile: &Tile,
            row: usize,
            d: usize,
        ) {
            let mut acc = [[zero(); C]; R];
            let fetch = row == 0 && !tile.next_values.is_null();
            // SAFETY: rows, keys and elements are inside their arrays by the caller's promise.
            unsafe {
                for t in 0..tile.num_keys {
                    if fetch {
                        let next = (*tile.next_values.add(t)).wrapping_offset(tile.next_value_offset);
                        for c in 0..C {
                            fetch_vector::<KIND>(next, d + c * LANES);
                        }
                    }
                    let value = (*tile.values.add(t)).wrapping_offset(tile.value_offset);
                    let mut v = [zero(); C];
                    if KIND == STORED_BF16_PAIRS {
                        for c in (0..C).step_by(2) {
                            (v[c], v[c + 1]) = load_pairs(value.cast::<u16>().add(d + c * LANES));
                        }
                    } else {
                        for c in 0..C {
                            v[c] = load_stored::<KIND>(value, d + c * LANES);
                        }
                    }
                    for r in 0..R {
                        let weight = splat(*tile.scores.add((row + r) * TILE + t));
                        for c in 0..C {
                            acc[r][c] = fma(weight, v[c], acc[r][c]);
                        }
                    }
                }
                for r in 0..R {
                    let factor = splat(*tile.rescale.add(row + r));
                    for c in 0..C {
                        let at = tile.acc.add((row + r) * tile.value_dim + d + c * LANES);
                        store(at, fma(load(at), factor, acc[r][c]));
                    }
                }
            }
        }

        /// Adds the weighted values of `R` rows.
        ///
        /// # Safety
        /// As for `value_block`.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn value_rows<const KIND: u8, const R: usize, const C: usize>(tile: &Tile, row: usize) {
            let mut d = 0;
            // SAFETY: the loops stop at `value_dim`, a multiple of `LANES`.
            unsafe {
                while d + C * LANES <= tile.value_dim {
                    value_block::<KIND, R, C>(tile, row, d);
                    d += C * LANES;
                }
                while d < tile.value_dim {
                    if KIND == STORED_BF16_PAIRS {
                        value_block::<KIND, R, 2>(tile, row, d);
                        d += 2 * LANES;
                    } else {
                        value_block::<KIND, R, 1>(tile, row, d);
                        d += LANES;
                    }
                }
            }
        }

        /// One tile: scores, weights, values.
        ///
        /// # Safety
        /// `tile` is as its type says and the processor has the target features.
        #[target_feature(enable = $features)]
        unsafe fn attend<const KIND: u8>(tile: &Tile) {
            // SAFETY: the row blocks stay inside `num_rows`.
            unsafe {
                let mut row = 0;
                while row + 4 <= tile.num_rows {
                    score_rows::<KIND, 4, { LANES / 4 }>(tile, row);
                    row += 4;
                }
                if row + 2 <= tile.num_rows {
                    score_rows::<KIND, 2, { LANES / 2 }>(tile, row);
                    row += 2;
                }
                if row < tile.num_rows {
                    score_rows::<KIND, 1, LANES>(tile, row);
                }
                for row in 0..tile.num_rows {
                    weigh_row::<KIND>(tile, row);
                }
                row = 0;
                while row + 4 <= tile.num_rows {
                    value_rows::<KIND, 4, VALUE_COLUMNS>(tile, row);
                    row += 4;
                }
                if row + 2 <= tile.num_rows {
                    value_rows::<KIND, 2, VALUE_COLUMNS>(tile, row);
                    row += 2;
                }
                if row < tile.num_rows {
                    value_rows::<KIND, 1, VALUE_COLUMNS>(tile, row);
                }
            }
        }

        /// Decodes `count` elements of `dtype` without gaps.
        ///
        /// # Safety
        /// Source and target hold them, and the processor has the target features.
        #[target_feature(enable = $features)]
        unsafe fn decode_row(
            source: *const u8,
            target: *mut f32,
            count: usize,
            dtype: crate::attention::Dtype,
        ) {
            use crate::attention::Dtype;
            use crate::attention::dtype::read_element;
            // SAFETY: by the caller's promise. One loop a type, so that each is vectorised.
            unsafe {
                match dtype {
                    Dtype::F32 => source.copy_to_nonoverlapping(target.cast(), count * 4),
                    Dtype::F16 => {
                        (0..count).for_each(|i| *target.add(i) = read_element(Dtype::F16, source.add(2 * i)))
                    }
                    Dtype::Bf16 => {
                        (0..count).for_each(|i| *target.add(i) = read_element(Dtype::Bf16, source.add(2 * i)))
                    }
                    Dtype::F8E4m3 => {
                        (0..count).for_each(|i| *target.add(i) = read_element(Dtype::F8E4m3, source.add(i)))
                    }
                    Dtype::F8E5m2 => {
                        (0..count).for_each(|i| *target.add(i) = read_element(Dtype::F8E5m2, source.add(i)))
                    }
                    Dtype::I8 => {
                        (0..count).for_each(|i| *target.add(i) = read_element(Dtype::I8, source.add(i)))
                    }
                }
            }
        }

        /// Decodes `count` bf16 elements without gaps, a multiple of `2 * LANES`, in the order of pairs.
        ///
        /// # Safety
        /// Source and target hold them, and the processor has the target features.
        #[target_feature(enable = $features)]
        unsafe fn decode_pairs(source: *const u8, target: *mut f32, count: usize) {
            // SAFETY: by the caller's promise.
            unsafe {
                for at in (0..count).step_by(2 * LANES) {
                    let (even, odd) = load_pairs(source.cast::<u16>().add(at));
                    store(target.add(at), even);
                    store(target.add(at + LANES), odd);
                }
            }
        }

        /// This instruction set's table.
        pub(super) static KERNELS: crate::attention::kernels::Kernels = crate::attention::kernels::Kernels {
            name: NAME,
            attend_f32: attend::<STORED_F32>,
            attend_f16: attend::<STORED_F16>,
            lanes: LANES,
            attend_bf16: attend::<STORED_BF16>,
            attend_bf16_pairs: attend::<STORED_BF16_PAIRS>,
            decode_row,
            decode_pairs,
        };
    };
}

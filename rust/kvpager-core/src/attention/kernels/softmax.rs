//! From products to weights: scale, cap, ALiBi, mask, and the running maximum and sum of each row. Part of `tile.rs`.
//!
//! A score of 20 in fp32 is off by up to 1e-6 from its rounding alone, and its weight by as much. Where the output
//! is fp32 and the running maximum is large, the scores near the maximum are therefore computed again in f64,
//! relative to the maximum: few keys of a peaked row, none of a flat one with small scores.

/// Instantiates the functions with the given target features.
macro_rules! softmax_kernels {
    ($features:literal) => {
        /// e^x for x <= 0, within 2 ulp; 0 below -87.3, NaN for NaN.
        #[inline]
        #[target_feature(enable = $features)]
        fn exp_negative(x: V) -> V {
            let lowest = splat(-87.3);
            let y = vmax(lowest, x);
            let n = round(mul(y, splat(std::f32::consts::LOG2_E)));
            let r = neg_fma(n, splat(0.693_359_4), y);
            let r = neg_fma(n, splat(-2.121_944_4e-4), r);
            let p = splat(1.987_569_1e-4);
            let p = fma(p, r, splat(1.398_199_9e-3));
            let p = fma(p, r, splat(8.333_452e-3));
            let p = fma(p, r, splat(4.166_579_6e-2));
            let p = fma(p, r, splat(1.666_666_5e-1));
            let p = fma(p, r, splat(5e-1));
            let p = add(fma(p, mul(r, r), r), splat(1.0));
            zero_below(mul(p, pow2(n)), x, lowest)
        }

        /// tanh(x) within 2 ulp.
        #[inline]
        #[target_feature(enable = $features)]
        fn tanh(x: V) -> V {
            let magnitude = vmax(x, neg_fma(x, splat(1.0), zero()));
            let z = mul(x, x);
            let p = splat(-5.704_988_7e-3);
            let p = fma(p, z, splat(2.063_908_8e-2));
            let p = fma(p, z, splat(-5.373_971_5e-2));
            let p = fma(p, z, splat(1.333_144_2e-1));
            let p = fma(p, z, splat(-3.333_328e-1));
            let near = fma(mul(p, z), x, x);
            // 1 - 2 e / (1 + e) with e = exp(-2 |x|), then the sign of x.
            let e = exp_negative(mul(magnitude, splat(-2.0)));
            let far = neg_fma(splat(2.0), div(e, add(e, splat(1.0))), splat(1.0));
            let negative = neg_fma(far, splat(1.0), zero());
            let far = pick_below(x, splat(0.0), negative, far);
            pick_below(magnitude, splat(0.625), near, far)
        }

        /// Scale, cap, ALiBi and mask on `LANES` products of a row, from key `t` of the tile on.
        #[inline]
        #[target_feature(enable = $features)]
        fn adjust(tile: &Tile, products: V, t: usize, span: [u32; 2], slope: f32, distance: f32) -> V {
            let mut x = mul(products, splat(tile.scale));
            if tile.softcap > 0.0 {
                x = mul(tanh(div(x, splat(tile.softcap))), splat(tile.softcap));
            }
            let number = add(lane_numbers(), splat(t as f32));
            if tile.has_slopes {
                x = fma(splat(slope), add(number, splat(distance)), x);
            }
            keep_between(x, number, splat(span[0] as f32), splat(span[1] as f32))
        }

        /// A row's product with one key, in f64.
        ///
        /// # Safety
        /// `tile` is as its type says, `row < num_rows` and `key < num_keys`.
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn exact_product<const KIND: u8>(tile: &Tile, row: usize, key: usize) -> f64 {
            let mut parts = [0.0f64; LANES];
            let mut add_lanes = |elements: V, query: *const f32| {
                let mut lanes = [0.0f32; LANES];
                // SAFETY: a row of the query has `key_dim` elements, a multiple of `LANES`.
                let query = unsafe {
                    store(lanes.as_mut_ptr(), elements);
                    std::slice::from_raw_parts(query, LANES)
                };
                for i in 0..LANES {
                    parts[i] += f64::from(lanes[i]) * f64::from(query[i]);
                }
            };
            // SAFETY: key and row are inside their arrays by the caller's promise.
            unsafe {
                let source = (*tile.keys.add(key)).wrapping_offset(tile.key_offset);
                let query = tile.query.add(row * tile.key_dim);
                let mut d = 0;
                while d < tile.key_dim {
                    if KIND == STORED_BF16_PAIRS {
                        let (even, odd) = load_pairs(source.cast::<u16>().add(d));
                        add_lanes(even, query.add(d));
                        d += LANES;
                        add_lanes(odd, query.add(d));
                    } else {
                        add_lanes(load_stored::<KIND>(source, d), query.add(d));
                    }
                    d += LANES;
                }
            }
            parts.iter().sum()
        }

        /// Subtracts the maximum from a row's scores, and computes those again in f64 that weigh enough to show.
        ///
        /// # Safety
        /// As for `weigh_row`; the scores have gone through `adjust`.
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn refine_row<const KIND: u8>(tile: &Tile, row: usize, slope: f32, distance: f32) {
            // SAFETY: `row` is inside the arrays.
            unsafe {
                let scores = std::slice::from_raw_parts_mut(tile.scores.add(row * TILE), tile.num_keys);
                let highest = *tile.max.add(row);
                let within = exact_within(highest, tile.has_slopes);
                for (t, score) in scores.iter_mut().enumerate() {
                    *score -= highest;
                    if *score > -within {
                        let mut x = exact_product::<KIND>(tile, row, t) * f64::from(tile.scale);
                        if tile.softcap > 0.0 {
                            let cap = f64::from(tile.softcap);
                            x = cap * (x / cap).tanh();
                        }
                        x += f64::from(slope) * (t as f64 + f64::from(distance));
                        *score = (x - f64::from(highest)) as f32;
                    }
                }
            }
        }

        /// Turns a row's products into weights relative to its running maximum, and updates maximum and sum. What
        /// the row had accumulated is to be multiplied by `rescale[row]`.
        ///
        /// # Safety
        /// `tile` is as its type says and `row < num_rows`.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn weigh_row<const KIND: u8>(tile: &Tile, row: usize) {
            // SAFETY: `row` is inside the arrays; `TILE` is a multiple of `LANES`.
            unsafe {
                let scores = tile.scores.add(row * TILE);
                let (span, mut slope, mut distance) = (*tile.visible.add(row), 0.0, 0.0);
                if tile.has_slopes {
                    slope = *tile.slopes.add(row);
                    distance = *tile.distances.add(row);
                }
                let old = *tile.max.add(row);
                let mut highest = splat(old);
                let mut t = 0;
                while t < tile.num_keys {
                    let x = adjust(tile, load(scores.add(t)), t, span, slope, distance);
                    highest = vmax(highest, x);
                    store(scores.add(t), x);
                    t += LANES;
                }
                let new = maximum(highest);
                *tile.rescale.add(row) = 1.0;
                if new == f32::NEG_INFINITY {
                    // Nothing visible so far.
                    scores.write_bytes(0, TILE);
                    return;
                }
                if new != old {
                    let mut factor = [0.0f32; LANES];
                    store(factor.as_mut_ptr(), exp_negative(splat(old - new)));
                    *tile.rescale.add(row) = factor[0];
                    *tile.max.add(row) = new;
                }
                let mut base = new;
                if tile.exact && (new.abs() > EXACT_ABOVE || tile.has_slopes) {
                    refine_row::<KIND>(tile, row, slope, distance);
                    base = 0.0;
                }
                let mut total = zero();
                let mut t = 0;
                while t < tile.num_keys {
                    let weight = exp_negative(add(load(scores.add(t)), splat(-base)));
                    total = add(total, weight);
                    store(scores.add(t), weight);
                    t += LANES;
                }
                *tile.sum.add(row) = *tile.sum.add(row) * *tile.rescale.add(row) + sum(total);
            }
        }
    };
}

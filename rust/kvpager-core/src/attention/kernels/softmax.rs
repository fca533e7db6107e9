//! From scores to weights: cap, ALiBi, mask, and the running maximum and sum of each row. Part of `tile.rs`.

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

        /// Cap, ALiBi and mask on `LANES` scores of a row, from key `t` of the tile on.
        #[inline]
        #[target_feature(enable = $features)]
        fn adjust(tile: &Tile, scores: V, t: usize, span: [u32; 2], slope: f32, distance: f32) -> V {
            let mut x = scores;
            if tile.softcap > 0.0 {
                x = mul(tanh(div(x, splat(tile.softcap))), splat(tile.softcap));
            }
            let number = add(lane_numbers(), splat(t as f32));
            if tile.has_slopes {
                x = fma(splat(slope), add(number, splat(distance)), x);
            }
            keep_between(x, number, splat(span[0] as f32), splat(span[1] as f32))
        }

        /// Turns a row's scores into weights relative to its running maximum, and updates maximum and sum. What
        /// the row had accumulated is to be multiplied by `rescale[row]`.
        ///
        /// # Safety
        /// `tile` is as its type says and `row < num_rows`.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn weigh_row(tile: &Tile, row: usize) {
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
                let mut total = zero();
                let mut t = 0;
                while t < tile.num_keys {
                    let weight = exp_negative(add(load(scores.add(t)), splat(-new)));
                    total = add(total, weight);
                    store(scores.add(t), weight);
                    t += LANES;
                }
                *tile.sum.add(row) = *tile.sum.add(row) * *tile.rescale.add(row) + sum(total);
            }
        }
    };
}

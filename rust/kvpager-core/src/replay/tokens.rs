//! Token ids for a trace that has none: cheap, and equal exactly where the trace says that prompts are.

/// Ids stay below this, so that the end token is none of them.
const MASK: u32 = (1 << 30) - 1;
/// The token that ends an output.
pub(super) const END_TOKEN: u32 = i32::MAX as u32;
/// Odd, so that consecutive offsets differ.
const STRIDE: u32 = 0x9E37_79B1;

/// A bijective mix of 64 bits (the finaliser of splitmix64).
fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Appends `count` tokens that are a function of the id and their offset.
///
/// Sixty bits of the mixed id are in the first two tokens, so that two ids give different blocks.
fn push_run(id: u64, count: usize, out: &mut Vec<u32>) {
    let mixed = mix(id);
    let (low, high) = (mixed as u32, (mixed >> 30) as u32);
    let start = out.len();
    out.extend((0..count as u32).map(|offset| high.wrapping_add(offset.wrapping_mul(STRIDE)) & MASK));
    if count > 0 {
        out[start] = low & MASK;
    }
}

/// The prompt of a request: one run of tokens for each hash id, and a run of its own for what has no id.
pub(super) fn prompt(num_tokens: u32, hash_block: u32, hash_ids: &[u64], request: u64, out: &mut Vec<u32>) {
    let mut left = num_tokens as usize;
    for &id in hash_ids {
        let count = left.min(hash_block as usize);
        push_run(id, count, out);
        left -= count;
    }
    // The top bit keeps requests apart from hash ids.
    push_run(request | 1 << 63, left, out);
}

/// The `index`-th sampled token of a request; no two requests share a sequence of them.
pub(super) fn output(request: u64, index: u32) -> u32 {
    (request as u32).wrapping_mul(0x85EB_CA6B).wrapping_add(index.wrapping_mul(STRIDE)) & MASK
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt_of(num_tokens: u32, ids: &[u64], request: u64) -> Vec<u32> {
        let mut out = Vec::new();
        prompt(num_tokens, 512, ids, request, &mut out);
        out
    }

    #[test]
    fn equal_ids_give_equal_tokens_and_other_ids_other_blocks() {
        let a = prompt_of(1100, &[7, 8, 9], 0);
        let b = prompt_of(1100, &[7, 8, 10], 1);
        assert_eq!(a.len(), 1100);
        assert_eq!(a[..1024], b[..1024]);
        assert_ne!(a[1024..1028], b[1024..1028]);
        let distinct: std::collections::HashSet<[u32; 2]> =
            (0..100_000u64).map(|id| prompt_of(2, &[id], 0).try_into().expect("two tokens")).collect();
        assert_eq!(distinct.len(), 100_000);
    }

    #[test]
    fn tokens_without_an_id_belong_to_one_request() {
        assert_ne!(prompt_of(16, &[], 1), prompt_of(16, &[], 2));
        assert_ne!(prompt_of(16, &[], 1), prompt_of(16, &[1], 2));
        assert!(prompt_of(600, &[3], 4).iter().all(|&token| token < END_TOKEN));
    }
}

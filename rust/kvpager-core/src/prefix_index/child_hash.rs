//! The keyed hash by which a node finds its child. It only speeds the look-up up: tokens are always compared.

use std::hash::{BuildHasher, RandomState};

/// Hash of (parent node, first block of the child).
///
/// NH, the universal hash of UMAC: the sum of products of pairs of keyed words. Over a secret random key two
/// different blocks collide with probability 2^-32 at most, so nobody can prepare prompts that pile up in one
/// bucket, and a block of 16 tokens takes eight multiplications instead of a SipHash run.
pub(super) enum ChildHash {
    /// Random key words, one for each token, and one that mixes the parent in.
    Keyed {
        /// One word a token, padded to an even number.
        words: Box<[u32]>,
        /// Odd multiplier of the parent's number.
        parent: u64,
    },
    /// The same value for everything: the test hook that shows that no collision can matter.
    Constant,
}

impl ChildHash {
    /// A fresh key from the standard library's source of random hash keys.
    pub(super) fn keyed(block_size: usize) -> Self {
        let source = RandomState::new();
        let words = (0..block_size.next_multiple_of(2)).map(|i| source.hash_one(i) as u32).collect();
        Self::Keyed { words, parent: source.hash_one(u64::MAX) | 1 }
    }

    /// The 32 bits that a node keeps of its hash.
    #[inline]
    pub(super) fn hash(&self, parent: u32, block: &[u32]) -> u32 {
        match self {
            Self::Constant => 0,
            Self::Keyed { words, parent: multiplier } => {
                mix(nh(words, block).wrapping_add(multiplier.wrapping_mul(u64::from(parent) + 1)))
            }
        }
    }

    /// Digest of a prefix that ends with `block` and whose digest without it is `previous`. For statistics only.
    #[inline]
    pub(super) fn chain(&self, previous: u64, block: &[u32]) -> u64 {
        match self {
            Self::Constant => 0,
            Self::Keyed { words, parent: multiplier } => {
                mix64(nh(words, block).wrapping_add(previous.wrapping_mul(*multiplier)))
            }
        }
    }

    /// The stored bits, spread over the 64 that the table uses (seven at the top, the rest at the bottom).
    #[inline]
    pub(super) fn spread(hash: u32) -> u64 {
        u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Sum over pairs of `(token + key) * (token + key)`, 32-bit sums, 64-bit products.
#[inline]
fn nh(words: &[u32], block: &[u32]) -> u64 {
    let pairs = block.chunks_exact(2);
    let rest = pairs.remainder();
    let mut sum = 0u64;
    for (tokens, keys) in pairs.zip(words.chunks_exact(2)) {
        let left = tokens[0].wrapping_add(keys[0]);
        let right = tokens[1].wrapping_add(keys[1]);
        sum = sum.wrapping_add(u64::from(left).wrapping_mul(u64::from(right)));
    }
    if let (Some(token), [.., left, right]) = (rest.first(), words) {
        sum = sum.wrapping_add(u64::from(token.wrapping_add(*left)).wrapping_mul(u64::from(*right)));
    }
    sum
}

/// A bijection of 64 bits in which every input bit reaches the kept half.
#[inline]
fn mix64(mut value: u64) -> u64 {
    value ^= value >> 32;
    value = value.wrapping_mul(0xd6e8_feb8_6659_fd93);
    value ^= value >> 32;
    value = value.wrapping_mul(0xd6e8_feb8_6659_fd93);
    value ^ (value >> 32)
}

#[inline]
fn mix(value: u64) -> u32 {
    (mix64(value) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_hash_depends_on_every_token_and_on_the_parent() {
        for block_size in [1usize, 2, 3, 16, 17] {
            let hash = ChildHash::keyed(block_size);
            let block: Vec<u32> = (0..block_size as u32).collect();
            let base = hash.hash(7, &block);
            assert_ne!(base, hash.hash(8, &block), "parent, block size {block_size}");
            for i in 0..block_size {
                let mut other = block.clone();
                other[i] ^= 1 << 31;
                assert_ne!(base, hash.hash(7, &other), "token {i}, block size {block_size}");
            }
        }
    }

    #[test]
    fn test_two_indexes_have_different_keys() {
        let block: Vec<u32> = (0..16).collect();
        let hashes: std::collections::HashSet<u32> =
            (0..8).map(|_| ChildHash::keyed(16).hash(0, &block)).collect();
        assert!(hashes.len() > 1);
    }

    /// Families that collide under linear, commutative or truncating hashes, drawn without knowing the key.
    #[test]
    fn test_prepared_blocks_do_not_pile_up() {
        let families: [fn(u32) -> [u32; 16]; 4] = [
            |i| std::array::from_fn(|at| if at == 3 { i } else { 7 }),
            |i| std::array::from_fn(|at| [i, 1, 0u32.wrapping_sub(i), 1][at % 4]),
            |i| std::array::from_fn(|at| (i >> at & 1) << 31),
            |i| std::array::from_fn(|at| i.wrapping_mul(1 << 16).wrapping_add(at as u32)),
        ];
        for (number, family) in families.iter().enumerate() {
            let hash = ChildHash::keyed(16);
            let blocks: std::collections::HashSet<[u32; 16]> = (0..20_000).map(family).collect();
            let hashes: std::collections::HashSet<u32> =
                blocks.iter().map(|block| hash.hash(1, block)).collect();
            assert!(hashes.len() * 1000 > blocks.len() * 998, "family {number}: {}", hashes.len());
        }
    }
}

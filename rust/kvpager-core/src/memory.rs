//! Memory that a caller's arguments size: too much of it is an error with the bytes, not the process's end.

use crate::{Error, Result};
use std::fmt::Display;
use std::sync::OnceLock;

/// What is to be made, in words, and the bytes of all that it allocates: what an error says if there is no room.
pub(crate) struct Asked<W> {
    what: W,
    num_bytes: u64,
}

impl<W: Display> Asked<W> {
    /// Refuses more bytes than the machine has: the system may promise more than there is, and end the process when the
    /// pages are written.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new(what: W, num_bytes: usize) -> Result<Self> {
        let asked = Self { what, num_bytes: num_bytes as u64 };
        match physical_memory() {
            Some(memory) if asked.num_bytes > memory => Err(asked.refused(Some(memory))),
            _ => Ok(asked),
        }
    }

    /// Room for so many values.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn room<T>(&self, capacity: usize) -> Result<Vec<T>> {
        let mut values = Vec::new();
        values.try_reserve_exact(capacity).map_err(|_| self.refused(None))?;
        Ok(values)
    }

    /// So many values, each from its number.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn array<T>(&self, length: usize, make: impl FnMut(usize) -> T) -> Result<Box<[T]>> {
        let mut values = self.room(length)?;
        values.extend((0..length).map(make));
        Ok(values.into_boxed_slice())
    }

    fn refused(&self, memory: Option<u64>) -> Error {
        Error::OutOfMemory { what: self.what.to_string(), num_bytes: self.num_bytes, memory }
    }
}

/// Bytes of so many values; too many of them are all that can be asked for.
pub(crate) const fn bytes_of<T>(count: usize) -> usize {
    count.saturating_mul(size_of::<T>())
}

/// Bytes of the machine's memory, where the system says so.
fn physical_memory() -> Option<u64> {
    static MEMORY: OnceLock<Option<u64>> = OnceLock::new();
    *MEMORY.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        let kibibytes: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kibibytes.checked_mul(1024)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_is_an_error_with_the_bytes() {
        let Err(error) = Asked::new("a pool", usize::MAX) else { panic!("nobody has so much") };
        let text = error.to_string();
        assert!(text.starts_with("a pool takes 18446744073709551615 bytes of memory, more than"), "{text}");
        let small = Asked::new("a list", 80).expect("it is small");
        let Err(error) = small.room::<u64>(usize::MAX / 8) else { panic!("nobody has so much") };
        assert_eq!(error.to_string(), "a list takes 80 bytes of memory, more than can be had now");
        assert_eq!(*small.array(3, |i| i * i).expect("it is small"), [0, 1, 4]);
    }
}

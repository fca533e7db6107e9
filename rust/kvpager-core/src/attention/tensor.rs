//! Strided views over memory that somebody else owns.

use super::Dtype;
use crate::{Error, Result};

/// A strided, possibly writable view of `N` dimensions. Strides are in bytes and may be zero or negative.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<const N: usize> {
    data: *mut u8,
    dtype: Dtype,
    shape: [usize; N],
    strides: [isize; N],
    writable: bool,
}

// SAFETY: a view is an address with a layout. Whoever makes one promises that the memory stays valid and that
// nobody else changes it meanwhile (see `from_raw`), from whichever thread it is reached.
unsafe impl<const N: usize> Send for Tensor<N> {}
// SAFETY: as above.
unsafe impl<const N: usize> Sync for Tensor<N> {}

impl<const N: usize> Tensor<N> {
    /// A view of `shape` at `data`.
    ///
    /// # Safety
    /// While the view is used, every element that shape and strides reach is valid memory of `dtype`: readable,
    /// and writable where `writable` is set. Nobody writes what is read, or touches what is written, during a
    /// call that gets the view.
    #[must_use]
    pub const unsafe fn from_raw(
        data: *mut u8,
        dtype: Dtype,
        shape: [usize; N],
        strides: [isize; N],
        writable: bool,
    ) -> Self {
        Self { data, dtype, shape, strides, writable }
    }

    /// Element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements along each dimension.
    #[must_use]
    pub const fn shape(&self) -> [usize; N] {
        self.shape
    }

    /// Bytes from one element to the next, along each dimension.
    #[must_use]
    pub const fn strides(&self) -> [isize; N] {
        self.strides
    }

    /// Address of an element; the offset is computed in 64 bits.
    #[inline(always)]
    pub(super) fn at(&self, index: [usize; N]) -> *mut u8 {
        let mut offset = 0isize;
        for axis in 0..N {
            debug_assert!(index[axis] < self.shape[axis], "{index:?} outside {:?}", self.shape);
            offset += index[axis] as isize * self.strides[axis];
        }
        self.data.wrapping_offset(offset)
    }

    /// Whether the last dimension is without gaps.
    pub(super) fn has_dense_rows(&self) -> bool {
        self.shape[N - 1] <= 1 || self.strides[N - 1] == self.dtype.size() as isize
    }

    /// Bytes of the elements that one index of the first dimension selects.
    pub(super) fn item_bytes(&self) -> usize {
        self.shape[1..].iter().product::<usize>() * self.dtype.size()
    }

    /// Whether the elements that one index of the first dimension selects lie without gaps, in order.
    pub(super) fn has_dense_items(&self) -> bool {
        let mut dense = self.dtype.size();
        (1..N).rev().all(|axis| {
            let fits = self.shape[axis] <= 1 || self.strides[axis] == dense as isize;
            dense *= self.shape[axis];
            fits
        })
    }

    pub(super) fn require_shape(&self, name: &str, shape: [usize; N]) -> Result<()> {
        if self.shape == shape {
            return Ok(());
        }
        Err(Error::invalid(format!("{name} has shape {:?}, expected {shape:?}", self.shape)))
    }

    /// Refuses what must not be written: read-only memory, and views in which two elements may share memory.
    pub(super) fn require_writable(&self, name: &str) -> Result<()> {
        if !self.writable {
            return Err(Error::invalid(format!("{name} is read-only")));
        }
        if self.may_overlap_itself() {
            return Err(Error::invalid(format!(
                "{name} is written, but overlaps itself: shape {:?}, strides {:?} bytes",
                self.shape, self.strides
            )));
        }
        Ok(())
    }

    /// Whether two elements may share memory: some axis steps less far than what lies inside it reaches. Slices and
    /// transposed views of an array never do.
    fn may_overlap_itself(&self) -> bool {
        let mut axes: [usize; N] = std::array::from_fn(|axis| axis);
        axes.sort_unstable_by_key(|&axis| self.strides[axis].unsigned_abs());
        let mut reach = self.dtype.size();
        !self.shape.contains(&0)
            && axes.into_iter().filter(|&axis| self.shape[axis] > 1).any(|axis| {
                let stride = self.strides[axis].unsigned_abs();
                let steps = self.shape[axis] - 1;
                let overlaps = stride < reach;
                reach = reach.saturating_add(stride.saturating_mul(steps));
                overlaps
            })
    }

    pub(super) fn require_dtype(&self, name: &str, allowed: &[Dtype]) -> Result<()> {
        if allowed.contains(&self.dtype) {
            return Ok(());
        }
        let names: Vec<_> = allowed.iter().map(|dtype| dtype.name()).collect();
        Err(Error::invalid(format!(
            "{name} has dtype {}, expected {}",
            self.dtype.name(),
            names.join(" or ")
        )))
    }
}

/// A strided matrix of `i32`, read only while a call checks it.
#[derive(Clone, Copy, Debug)]
pub struct Int32Matrix {
    data: *const i32,
    shape: [usize; 2],
    strides: [isize; 2],
}

// SAFETY: as for `Tensor`.
unsafe impl Send for Int32Matrix {}
// SAFETY: as for `Tensor`.
unsafe impl Sync for Int32Matrix {}

impl Int32Matrix {
    /// A view of `shape` at `data`; strides in bytes.
    ///
    /// # Safety
    /// Every element that shape and strides reach is readable and aligned while the view is used.
    #[must_use]
    pub const unsafe fn from_raw(data: *const i32, shape: [usize; 2], strides: [isize; 2]) -> Self {
        Self { data, shape, strides }
    }

    /// Rows and columns.
    #[must_use]
    pub const fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// One element; `None` outside the shape. The scheduler may append to other entries meanwhile, so the read
    /// is volatile and the value is used only through the copy that was checked.
    #[must_use]
    pub fn get(&self, row: usize, column: usize) -> Option<i32> {
        if row >= self.shape[0] || column >= self.shape[1] {
            return None;
        }
        let offset = row as isize * self.strides[0] + column as isize * self.strides[1];
        // SAFETY: inside the shape, so readable and aligned by the promise of `from_raw`.
        Some(unsafe { self.data.cast::<u8>().wrapping_offset(offset).cast::<i32>().read_volatile() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: [usize; 3], strides: [isize; 3]) -> Tensor<3> {
        // SAFETY: only the layout is looked at.
        unsafe { Tensor::from_raw(std::ptr::null_mut(), Dtype::F32, shape, strides, true) }
    }

    /// Whether two elements share a byte, by looking at all of them.
    fn overlaps(shape: [usize; 3], strides: [isize; 3]) -> bool {
        let mut starts = vec![];
        for i in 0..shape[0] as isize {
            for j in 0..shape[1] as isize {
                starts
                    .extend((0..shape[2] as isize).map(|k| i * strides[0] + j * strides[1] + k * strides[2]));
            }
        }
        starts.sort_unstable();
        starts.windows(2).any(|pair| pair[1] - pair[0] < 4)
    }

    #[test]
    fn what_overlaps_itself_is_found_and_usual_views_are_not() {
        for (shape, strides) in [
            ([2, 3, 4], [48, 16, 4]),
            ([2, 3, 4], [4, 8, 24]),
            ([3, 2, 4], [-16, 48, 4]),
            ([2, 3, 4], [96, 32, 8]),
            ([1, 3, 4], [0, 16, 4]),
            ([0, 3, 4], [0, 0, 0]),
        ] {
            assert!(!overlaps(shape, strides) && view(shape, strides).require_writable("out").is_ok());
        }
        for stride in -40..40 {
            let (shape, strides) = ([3, 2, 4], [stride, 16, 4]);
            let refused = view(shape, strides).require_writable("out").is_err();
            assert!(refused || !overlaps(shape, strides), "{strides:?}");
        }
        assert!(view([3, 4, 2], [0, 8, 4]).require_writable("out").is_err());
    }
}

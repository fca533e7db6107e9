//! Requests as columns, checked when they come in.

use crate::{Error, Result};

/// Longest prompt or output, tokens.
const MAX_TOKENS: u32 = 1 << 24;

/// A block of requests in order of arrival; every column has one entry a request.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// Seconds from the start of the trace.
    pub arrival: &'a [f64],
    /// Tokens of the prompt, at least 1.
    pub prompt_tokens: &'a [u32],
    /// Tokens of the output, at least 1.
    pub output_tokens: &'a [u32],
    /// Index of the tenant.
    pub tenant: &'a [u32],
    /// A request waits for the answer to the one before it in its session; 0 is no session.
    pub session: &'a [u64],
    /// Seconds between that answer and this request.
    pub think_time: &'a [f64],
    /// Where each request's ids begin in `hash_ids`; one entry more than there are requests.
    pub hash_start: &'a [u64],
    /// Ids of prompt blocks.
    pub hash_ids: &'a [u64],
}

impl Columns<'_> {
    /// Checks shapes and ranges.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the column and the row.
    pub fn validate(&self, num_tenants: u32) -> Result<()> {
        let rows = self.arrival.len();
        let lengths = [
            ("prompt_tokens", self.prompt_tokens.len()),
            ("output_tokens", self.output_tokens.len()),
            ("tenant", self.tenant.len()),
            ("session", self.session.len()),
            ("think_time", self.think_time.len()),
            ("hash_start", self.hash_start.len().wrapping_sub(1)),
        ];
        if let Some((name, length)) = lengths.iter().find(|(_, length)| *length != rows) {
            return Err(Error::invalid(format!("column {name} has {length} rows, arrival has {rows}")));
        }
        let bounded = self.hash_start.windows(2).all(|pair| pair[0] <= pair[1]);
        if !bounded || self.hash_start[rows] as usize != self.hash_ids.len() || self.hash_start[0] != 0 {
            return Err(Error::invalid(format!(
                "hash_start must rise from 0 to the number of hash ids, {}",
                self.hash_ids.len()
            )));
        }
        (0..rows).try_for_each(|row| self.validate_row(row, num_tenants))
    }

    fn validate_row(&self, row: usize, num_tenants: u32) -> Result<()> {
        let tokens = |name: &str, count: u32| {
            if (1..=MAX_TOKENS).contains(&count) {
                return Ok(());
            }
            Err(Error::invalid(format!("{name}[{row}] is {count}, expected 1 to {MAX_TOKENS}")))
        };
        tokens("prompt_tokens", self.prompt_tokens[row])?;
        tokens("output_tokens", self.output_tokens[row])?;
        if self.tenant[row] >= num_tenants {
            return Err(Error::invalid(format!(
                "tenant[{row}] is {}, there are {num_tenants}",
                self.tenant[row]
            )));
        }
        for (name, seconds) in [("arrival", self.arrival[row]), ("think_time", self.think_time[row])] {
            if !(seconds.is_finite() && seconds >= 0.0) {
                return Err(Error::invalid(format!("{name}[{row}] is {seconds}, expected at least 0")));
            }
        }
        Ok(())
    }

    /// The hash ids of a request.
    pub(super) fn ids(&self, row: usize) -> &[u64] {
        &self.hash_ids[self.hash_start[row] as usize..self.hash_start[row + 1] as usize]
    }
}

//! Block states, reference counts, generations, reservations and quotas; lock-free.

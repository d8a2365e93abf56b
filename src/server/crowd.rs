//! How many connections each client has. One client has a whole /64 of IPv6, so that is what counts as an address.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex},
};

use super::client::lock;

/// The lower half of an IPv6 address.
const WITHIN_ONE: u128 = u64::MAX as u128;

/// The connections by address. Clients choose their addresses, so the hash must not be a known one.
#[derive(Debug, Default)]
pub(super) struct Crowd(Mutex<HashMap<IpAddr, usize>>);

/// One connection of an address. Dropping it ends that.
#[derive(Debug)]
pub(super) struct Presence {
    crowd: Arc<Crowd>,
    address: IpAddr,
}

impl Crowd {
    /// Counts a connection; none if its address has as many as it may already.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr, most: usize) -> Option<Presence> {
        let address = one(address);
        let mut here = lock(&self.0);
        let count = here.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Presence { crowd: Arc::clone(self), address })
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = lock(&self.crowd.0).entry(self.address) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// What stands for a client.
fn one(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !WITHIN_ONE).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_so_many() {
        let crowd = Arc::new(Crowd::default());
        let enter = |address: &str| crowd.enter(address.parse().unwrap(), 2);
        let first = enter("192.0.2.1").unwrap();
        let _second = enter("::ffff:192.0.2.1").unwrap();
        assert!(enter("192.0.2.1").is_none());
        let _other = enter("192.0.2.2").unwrap();
        drop(first);
        let _third = enter("192.0.2.1").unwrap();
        assert!(enter("192.0.2.1").is_none());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let crowd = Arc::new(Crowd::default());
        let enter = |address: &str| crowd.enter(address.parse().unwrap(), 1);
        let here = enter("2001:db8:0:1::1").unwrap();
        assert!(enter("2001:db8:0:1:ffff::2").is_none());
        drop(enter("2001:db8:0:2::1").unwrap());
        drop(here);
        assert!(lock(&crowd.0).is_empty(), "nobody is remembered who left");
    }
}

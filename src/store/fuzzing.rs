//! What must hold for whatever a server answers.

use deadpool_redis::redis;

use super::scripts;

/// A reply is read or refused, and nothing in it is more than what was sent.
pub fn reply(bytes: &[u8]) {
    let Ok(reply) = redis::parse_redis_value(bytes) else { return };
    if let Ok((releases, acquires)) = scripts::read_turn(reply.clone()) {
        assert!(releases.outcomes.len() + acquires.outcomes.len() <= bytes.len());
        assert!(acquires.granted.len() + acquires.displaced.len() <= bytes.len());
    }
    if let Ok(beat) = scripts::read_heartbeat(reply.clone()) {
        assert!(beat.sets.len() + beat.pending.len() + beat.instances.len() <= bytes.len());
    }
    if let Ok(status) = scripts::read_status(reply) {
        assert!(status.waiting.len() + status.by_instance.len() <= bytes.len());
    }
}

//! The first words on a link: is this a server that can hold slots?

use deadpool_redis::redis::{Pipeline, aio::MultiplexedConnection};

use crate::store::{StoreError, scripts};

/// The oldest that knows script flags.
const OLDEST: u32 = 7;

/// A server that can hold slots, with every script loaded.
#[derive(Debug)]
pub(super) struct Server {
    /// Changes whenever it starts anew.
    pub(super) run: String,
}

impl Server {
    pub(super) async fn greet(connection: &mut MultiplexedConnection) -> Result<Self, StoreError> {
        let mut pipeline = Pipeline::new();
        for section in ["server", "replication", "persistence"] {
            pipeline.cmd("INFO").arg(section);
        }
        let info: Vec<String> = pipeline.query_async(connection).await?;
        let server = Self::of(&info.concat())?;
        let mut pipeline = Pipeline::new();
        scripts::load(&mut pipeline);
        pipeline.exec_async(connection).await?;
        Ok(server)
    }

    fn of(info: &str) -> Result<Self, StoreError> {
        let fact = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        let unfit = |why: String| Err(StoreError::Unavailable(why));
        // Valkey says 7.2 here too.
        let version = fact("redis_version").unwrap_or("unknown");
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_none_or(|major| major < OLDEST) {
            return unfit(format!("Redis {OLDEST}.0 or Valkey is needed, this is Redis {version}"));
        }
        if fact("loading") == Some("1") {
            return unfit("the server is still loading its data".to_owned());
        }
        if fact("role") != Some("master") {
            return unfit("the server is a replica".to_owned());
        }
        match fact("run_id") {
            Some(run) if !run.is_empty() => Ok(Self { run: run.to_owned() }),
            _ => Err(StoreError::BadReply("INFO tells no run_id".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(version: &str, role: &str, loading: u8) -> String {
        format!(
            "# Server\r\nredis_version:{version}\r\nrun_id:abc\r\nrole:{role}\r\nloading:{loading}\r\n"
        )
    }

    #[test]
    fn only_a_loaded_master_of_version_seven_will_do() {
        assert_eq!(Server::of(&info("7.0.15", "master", 0)).unwrap().run, "abc");
        for (version, role, loading, why) in [
            ("6.2.1", "master", 0, "this is Redis 6.2.1"),
            ("7.2.4", "slave", 0, "replica"),
            ("7.2.4", "master", 1, "loading"),
        ] {
            let error = Server::of(&info(version, role, loading)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}

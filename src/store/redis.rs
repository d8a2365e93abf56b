//! The store in Redis: the ledger's rules as scripts, so that a whole fleet counts together.
//!
//! Three kinds of connection: an ordered one that carries every command that writes ([`RedisLink`]), one for those
//! who only look, and one per subscription (`subscription`), which is never more than a hint.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use deadpool_redis::{
    Connection, PoolError,
    redis::{
        Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value, aio::MultiplexedConnection,
    },
};
use tokio::{task::JoinSet, task::unconstrained};
use uuid::Uuid;

use super::{
    Acquire, AcquireReply, Acquired, BoxFuture, Call, Caller, Evict, Evicted, Holder, Link, Push,
    Reply, SetSpec, SetStatus, SlotStore, StoreError,
    keys::Keys,
    scripts::{self, Writer},
};
use crate::config::{RedisAt, Store as Settings};

mod finder;
mod look;
mod server;
mod subscription;

use self::{
    finder::{Finder, Primary},
    server::{Found, Needs, Server},
};

/// Nodes of a Cluster that are asked before one of them must be the owner.
const MOST_HOPS: usize = 3;

/// Slots counted in Redis.
pub struct RedisStore {
    finder: Arc<Finder>,
    keys: Arc<Keys>,
    needs: Needs,
    op_timeout: Duration,
    /// What was last said about the server.
    remarks: Mutex<Vec<String>>,
    /// Dropping the store aborts them.
    tasks: Mutex<JoinSet<()>>,
}

impl RedisStore {
    /// A store in a Redis, for limits of which any has a strict recovery or none. Connects to nothing yet.
    ///
    /// # Errors
    /// [`StoreError::Unfit`] if that is no place where a Redis could be.
    pub fn new(at: &RedisAt, settings: &Settings, strict: bool) -> Result<Arc<Self>, StoreError> {
        Ok(Arc::new(Self {
            finder: Arc::new(Finder::new(at, settings)?),
            keys: Arc::new(Keys::new(&settings.prefix)),
            needs: Needs { prefix: settings.prefix.clone(), strict },
            op_timeout: settings.op_timeout,
            remarks: Mutex::default(),
            tasks: Mutex::default(),
        }))
    }

    async fn link(&self) -> Result<Arc<dyn Link>, StoreError> {
        let opened = self.find_link().await;
        match &opened {
            Err(StoreError::Unfit(why)) => self.remark(vec![why.clone()]),
            Err(_) => self.finder.forget(),
            Ok(_) => {}
        }
        Ok(Arc::new(opened?))
    }

    async fn find_link(&self) -> Result<RedisLink, StoreError> {
        let mut primary = self.finder.find().await?;
        for _ in 0..MOST_HOPS {
            let connection = primary.pool.get().await?;
            let found = Server::greet(&mut connection.clone(), &self.needs).await?;
            let server = match found {
                Found::Here(server) => server,
                Found::Elsewhere(host, port) => {
                    primary = self.finder.turn_to(host, port)?;
                    continue;
                }
            };
            self.remark(server.remarks);
            let keys = Arc::clone(&self.keys);
            return Ok(RedisLink { connection: Some(connection), primary, keys, run: server.run });
        }
        Err(StoreError::Unavailable("the nodes of the Cluster don't agree on the owner".to_owned()))
    }

    /// Says what is wrong with a server, once.
    fn remark(&self, remarks: Vec<String>) {
        let mut said = self.remarks.lock().expect("nothing panics under this lock");
        if *said != remarks {
            remarks.iter().for_each(|why| tracing::warn!(why, "the store is not as it should be"));
            *said = remarks;
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().expect("nothing panics under this lock").spawn(task);
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl SlotStore for RedisStore {
    fn open(&self) -> BoxFuture<'_, Result<Arc<dyn Link>, StoreError>> {
        Box::pin(self.link())
    }

    fn subscribe(&self, instance: Uuid, push: Push) {
        let (finder, channel) = (Arc::clone(&self.finder), self.keys.channel(instance));
        self.spawn(subscription::run(finder, channel, self.op_timeout, push));
        self.spawn(Arc::clone(&self.finder).keep_looking());
    }

    fn status<'a>(&'a self, set: &'a SetSpec) -> BoxFuture<'a, Result<SetStatus, StoreError>> {
        Box::pin(self.see_status(set))
    }

    fn holders<'a>(&'a self, set: &'a SetSpec) -> BoxFuture<'a, Result<Vec<Holder>, StoreError>> {
        Box::pin(self.see_holders(set))
    }

    fn evict<'a>(
        &'a self,
        set: &'a SetSpec,
        evict: &'a Evict,
    ) -> BoxFuture<'a, Result<Evicted, StoreError>> {
        Box::pin(self.tell_to_evict(set, evict))
    }
}

// === impl RedisLink ===

/// One connection, checked out of the pool for as long as the link lives and never given back to it.
struct RedisLink {
    /// None only while it is dropped.
    connection: Option<Connection>,
    primary: Arc<Primary>,
    keys: Arc<Keys>,
    /// Which run of the server this is.
    run: String,
}

impl RedisLink {
    fn handle(&self) -> Result<MultiplexedConnection, StoreError> {
        let connection = self.connection.as_deref().cloned();
        connection.ok_or_else(|| StoreError::Unavailable("the link is closed".to_owned()))
    }

    /// The commands of a call, in the order in which they are applied.
    fn commands(&self, caller: &Caller, call: &Call) -> Vec<Cmd> {
        let writer = Writer { keys: &self.keys, run: &self.run, caller };
        let plan = Turns::of(call);
        let of_kind =
            |rated| call.acquires.iter().filter(move |acquire| is_rated(acquire) == rated);
        let (none, releases) = (call.acquires[..0].iter(), &call.releases[..]);
        let first = match (plan.releases, plan.together) {
            (_, true) => Some(writer.turn(releases, of_kind(false), false)),
            (true, _) => Some(writer.turn(releases, none, false)),
            _ => None,
        };
        let heartbeat = call.heartbeat.as_ref().map(|heartbeat| writer.heartbeat(heartbeat));
        let others = plan.others && !plan.together;
        let others = others.then(|| writer.turn(&[], of_kind(false), false));
        let rated = plan.rated.then(|| writer.turn(&[], of_kind(true), true));
        [first, heartbeat, others, rated].into_iter().flatten().collect()
    }

    async fn apply(&self, commands: Vec<Cmd>, call: &Call) -> Result<Reply, StoreError> {
        if self.primary.is_replaced() {
            return Err(StoreError::Unavailable("another server is the primary now".to_owned()));
        }
        let mut connection = self.handle()?;
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command(command);
        }
        let answers = connection.send_packed_commands(&pipeline, 0, pipeline.len()).await?;
        let mut answers = answers.into_iter();
        let mut next = || answers.next().unwrap_or(Value::Nil).extract_error();
        let mut reply = Reply::default();
        let plan = Turns::of(call);
        if plan.releases {
            let (releases, acquires) = scripts::read_turn(next()?)?;
            reply.releases = Some(releases);
            reply.acquires = plan.together.then_some(acquires);
        }
        if call.heartbeat.is_some() {
            reply.heartbeat = Some(scripts::read_heartbeat(next()?)?);
        }
        if plan.others && !plan.together {
            reply.acquires = Some(scripts::read_turn(next()?)?.1);
        }
        let rated = call.acquires.iter().filter(|acquire| is_rated(acquire)).count();
        if rated > 0 {
            let of_rated = match next() {
                // Only these keep more the more values of a key there are, so only these are refused.
                Err(error) if error.code() == Some("OOM") => AcquireReply {
                    stamp: reply
                        .acquires
                        .as_ref()
                        .map(|acquires| acquires.stamp)
                        .unwrap_or_default(),
                    outcomes: vec![Acquired::NoMemory; rated],
                    ..AcquireReply::default()
                },
                answer => scripts::read_turn(answer?)?.1,
            };
            reply.acquires = Some(merge(call, reply.acquires.take().unwrap_or_default(), of_rated));
        }
        Ok(reply)
    }
}

/// Which commands a call becomes.
struct Turns {
    releases: bool,
    /// Requests without rates.
    others: bool,
    rated: bool,
    /// Releases and requests without rates, in one command.
    together: bool,
}

impl Turns {
    fn of(call: &Call) -> Self {
        let releases = !call.releases.is_empty();
        let others = call.acquires.iter().any(|acquire| !is_rated(acquire));
        let rated = call.acquires.iter().any(is_rated);
        Self { releases, others, rated, together: call.is_one_turn() }
    }
}

fn is_rated(acquire: &Acquire) -> bool {
    !acquire.ask.rates.is_empty()
}

/// Puts the outcomes of the two scripts into the order of the call.
fn merge(call: &Call, others: AcquireReply, rated: AcquireReply) -> AcquireReply {
    let (mut of_others, mut of_rated) = (others.outcomes.into_iter(), rated.outcomes.into_iter());
    let mut next = |acquire| if is_rated(acquire) { of_rated.next() } else { of_others.next() };
    AcquireReply {
        outcomes: call.acquires.iter().filter_map(&mut next).collect(),
        stamp: if rated.stamp.now > 0 { rated.stamp } else { others.stamp },
        granted: [others.granted, rated.granted].concat(),
        fences: [others.fences, rated.fences].concat(),
        displaced: [others.displaced, rated.displaced].concat(),
    }
}

impl Link for RedisLink {
    /// The commands are written when the future is first polled, so a caller with several calls under way polls each
    /// once, in order, before it awaits any.
    ///
    /// Where Redis has forgotten the scripts (`SCRIPT FLUSH`) the call fails, and opening the next link loads them.
    /// To send it again here would put it behind calls that were made later.
    fn call<'a>(
        &'a self,
        caller: &'a Caller,
        call: &'a Call,
    ) -> BoxFuture<'a, Result<Reply, StoreError>> {
        let commands = self.commands(caller, call);
        // Unconstrained: a task whose budget is spent would else not get in line at the first poll.
        Box::pin(unconstrained(self.apply(commands, call)))
    }
}

impl Drop for RedisLink {
    fn drop(&mut self) {
        // A link is replaced when something is wrong with it, so its connection must not return to the pool.
        drop(self.connection.take().map(Connection::take));
    }
}

impl fmt::Debug for RedisLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLink").field("run", &self.run).finish_non_exhaustive()
    }
}

// === errors ===

impl From<RedisError> for StoreError {
    /// Only the server's own words, or the system's, go into the text: never the URL.
    fn from(error: RedisError) -> Self {
        if error.is_timeout() {
            return Self::Timeout;
        }
        let text = || match (error.code(), error.detail()) {
            (Some(code), Some(detail)) => format!("{code} {detail}"),
            (Some(code), None) => code.to_owned(),
            (None, Some(detail)) => format!("{}: {detail}", error.category()),
            (None, None) => error.category().to_owned(),
        };
        match error.kind() {
            ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => {
                Self::Unfit(text())
            }
            _ if matches!(error.code(), Some("NOAUTH" | "WRONGPASS")) => Self::Unfit(text()),
            ErrorKind::Io => Self::Unavailable(error.to_string()),
            ErrorKind::Parse
            | ErrorKind::UnexpectedReturnType
            | ErrorKind::Server(ServerErrorKind::ResponseError) => Self::BadReply(text()),
            _ => Self::Unavailable(text()),
        }
    }
}

impl From<PoolError> for StoreError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Timeout(_) => Self::Timeout,
            PoolError::Backend(error) => error.into(),
            other => Self::Unavailable(other.to_string()),
        }
    }
}
